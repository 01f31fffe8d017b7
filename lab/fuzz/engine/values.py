"""Values of fields: usual, edge and absurd ones. All are JSON, so that a request can be printed and sent again.

A long value has a short form: `{"$repeat": [part, count]}` is a text or list that repeats `part`, and
`{"$nest": [opening, inner, closing, depth]}` is a nested text. `expanded` makes the long value.
"""

import math
from typing import Any

VOCABULARY, EOS, CONTEXT_TOKENS = 49_152, 2, 256
"""Tokens of the demo model's vocabulary, its end token, and tokens of a context of the engine that the fuzz starts."""

USUAL, EDGE, ABSURD = KINDS = "usual", "edge", "absurd"

NAN, INF = math.nan, math.inf
BIG = [2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, -(2**31) - 1, -(2**63) - 1]
TINY = [5e-324, 1e-310, 1e-45, 1.2e-38, 1e-30, 1e-8]
HUGE = [3.4028234e38, 3.5e38, 1e39, 1e308, INF]
OTHER_TYPES = [None, True, False, "", "x", "1", "nan", [], {}, [None], [[]], {"a": 1}, 1.5, -1, 0, NAN]
"""Values of another type than a field has, or empty ones."""

SURROGATES = ["\ud83d", "\udc00", "ab\ud800c", "\udfff\ud800"]
TEXTS = [
    "\0",
    "a\0b",
    "\ufeff",
    "\ufeffthe",
    "\u202eabc\u202c",
    "\u200f\u05d0\u05d1",
    "e\u0301\u0301\u0301",
    {"$repeat": ["e\u0301", 2_000]},
    {"$repeat": ["\u0301", 5_000]},
    "\ufffd",
    "\uffff",
    "\U0010ffff",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "\r\n",
    "\t",
    " ",
    "\n",
    "\u2028",
    "\x1b[31m",
    "<|im_end|>",
    "<|endoftext|>",
    "{{ 7 }}",
    "{% for x in y %}",
    "%s%n",
    "../../etc",
]
LONG_TEXTS = [
    {"$repeat": ["a", 256]},
    {"$repeat": ["a", 257]},
    {"$repeat": ["a", 100_000]},
    {"$repeat": ["\U0001f469", 256]},
    {"$repeat": ["the ", 30_000]},
]

TOKEN_LISTS = {
    USUAL: [[504, 2365, 355], [260], [28, 30]],
    EDGE: [[0], [EOS], [1, 2], [VOCABULARY - 1], [260, 260, 260], {"$repeat": [[260], 5_000]}, []],
    ABSURD: [
        [VOCABULARY],
        [-1],
        [10**6],
        [2**31 - 1],
        [2**31],
        [2**63],
        [-(2**63) - 1],
        [NAN],
        [1.5],
        [INF],
        [None],
        ["a"],
        [[1]],
        [True],
        [260, VOCABULARY + 5],
        {"$repeat": [[260], 200_000]},
        "260",
        260,
        {},
    ],
}

FORMS = {
    USUAL: [
        {"regex": "[a-f]{3}-[0-9]{4}"},
        {"choice": ["a heron", "a hound"]},
        {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
        {"json_object": True},
        {"grammar": 'root ::= "yes" | "no"'},
    ],
    EDGE: [
        {"regex": ""},
        {"regex": "a*"},
        {"regex": "()"},
        {"regex": "\u05d0+\u0301"},
        {"regex": "[^\\x00-\\x7f]{2}"},
        {"choice": [""]},
        {"choice": ["", "a"]},
        {"choice": ["a", "a"]},
        {"choice": ['"', "\\", "\n"]},
        {"choice": {"$repeat": [["heron", "hound"], 2_000]}},
        {"json": {}},
        {"json": True},
        {"json": {"type": "string", "maxLength": 0}},
        {"json": {"enum": [None]}},
        {"json": {"type": "array", "minItems": 500, "items": {"type": "null"}}},
        {"json": {"$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}},
        {"grammar": 'root ::= "a" root | "b"'},
        {"grammar": 'root ::= ""'},
        {"grammar": 'root ::= root "a" | "a"'},
        {"regex": {"$nest": ["(", "a", ")", 100]}},
        {"grammar": {"$nest": ["root ::= ", '"a"', "", 1]}},
    ],
    ABSURD: [
        {},
        {"json_object": False},
        {"regex": "a", "choice": ["a"]},
        {"regex": "[^\\s\\S]"},
        {"regex": "a[^\\s\\S]"},
        {"regex": "[z-a]"},
        {"regex": "(((("},
        {"regex": "*"},
        {"regex": "\\"},
        {"regex": "(?=a)b"},
        {"regex": "(a)\\1"},
        {"regex": "a{5,2}"},
        {"regex": "a{99999999999}"},
        {"regex": "(a{1,500}){1,500}"},
        {"regex": "((a{1,100}){1,100}){1,100}"},
        {"regex": "(a|a)*(a|a)*(a|aa)*b" * 4},
        {"regex": "(.*)*(.*)*(.*)*x{1,1000}"},
        {"regex": {"$nest": ["(", "a", ")", 2_000]}},
        {"regex": {"$nest": ["(", "a", ")", 20_000]}},
        {"regex": {"$repeat": ["a?", 5_000]}},
        {"regex": {"$repeat": ["[a-z]", 100_000]}},
        {"regex": "\ud800"},
        {"regex": "\0"},
        {"choice": []},
        {"choice": ["\ud83d"]},
        {"choice": ["\0"]},
        {"choice": [{"$repeat": ["a", 100_000]}]},
        {"choice": [1]},
        {"json": "not json"},
        {"json": ""},
        {"json": "[]"},
        {"json": "7"},
        {"json": False},
        {"json": {"not": {}}},
        {"json": {"enum": []}},
        {"json": {"type": "no such type"}},
        {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
        {"json": {"type": "string", "minLength": 5, "maxLength": 3}},
        {"json": {"type": "string", "pattern": "(((("}},
        {"json": {"type": "string", "pattern": "(a{1,500}){1,500}"}},
        {"json": {"type": "string", "minLength": 100_000}},
        {"json": {"type": "array", "minItems": 2**31, "items": {"type": "null"}}},
        {"json": {"type": "object", "minProperties": 2**40}},
        {"json": {"$ref": "#"}},
        {"json": {"$ref": "#/nowhere"}},
        {"json": {"$ref": "http://127.0.0.1:9/x.json"}},
        {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        {"json": {"$nest": ['{"type":"array","items":', '{"type":"null"}', "}", 2_000]}},
        {"json": {"$nest": ['{"properties":{"a":', "{}", "}}", 20_000]}},
        {"json": {"$nest": ["[", "", "]", 2_000]}},
        {"json": '{"type": "integer", "maximum": 1e400}'},
        {"json": '{"const": "\\ud800"}'},
        {"grammar": ""},
        {"grammar": "root ::="},
        {"grammar": "root ::= nowhere"},
        {"grammar": "root ::= root"},
        {"grammar": 'root ::= "a" root'},
        {"grammar": "root ::= a\na ::= b\nb ::= a"},
        {"grammar": 'x ::= "a"'},
        {"grammar": 'root ::= "a" [^\\x00-\\U0010ffff]'},
        {"grammar": 'root ::= ("a" | "b"){1,100000}'},
        {"grammar": {"$nest": ["root ::= ", {"$nest": ["(", '"a"', ")", 2_000]}, "", 1]}},
        {"grammar": "\0\0\0"},
        {"grammar": "\ud800"},
        {"structural_tag": "{}"},
        {"structural_tag": "not json"},
        {"structural_tag": {"type": "structural_tag", "format": {"type": "no such format"}}},
        {"structural_tag": {"structures": [], "triggers": []}},
        {"structural_tag": {"structures": [{"begin": "a", "schema": {}, "end": "b"}], "triggers": ["x"]}},
        {"no_such_form": 1},
    ],
}


def expanded(value: Any) -> Any:
    """Returns a value with its short forms expanded."""
    if isinstance(value, list):
        return [expanded(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$repeat"}:
        part, count = value["$repeat"]
        return part * count
    if value.keys() == {"$nest"}:
        opening, inner, closing, depth = value["$nest"]
        return opening * depth + expanded(inner) + closing * depth
    return {name: expanded(one) for name, one in value.items()}
