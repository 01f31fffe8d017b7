"""Every field of a request with the values that are drawn for it: usual, edge and absurd ones."""

from tailrace.lab.fuzz.engine.values import (
    ABSURD,
    BIG,
    CONTEXT_TOKENS,
    EDGE,
    EOS,
    FORMS,
    HUGE,
    INF,
    LONG_TEXTS,
    NAN,
    OTHER_TYPES,
    SURROGATES,
    TEXTS,
    TINY,
    TOKEN_LISTS,
    USUAL,
    VOCABULARY,
)

PROMPTS = [[504, 2365, 355, 260, 4052], [260, 1568, 282, 260, 1004, 28] * 4, [1, 504, 2365, 314]]

SIZES = {USUAL: [1, 2, 5], EDGE: [0, -1, 2**31 - 1], ABSURD: [*BIG, -2, *OTHER_TYPES]}
SHARES = {USUAL: [0.1, 0.5, 0.9], EDGE: [0.0, 1.0, -0.0, *TINY, 1 - 1e-9], ABSURD: [NAN, INF, -INF, -0.1, 1.1, 2, 1e39]}
PENALTIES = {USUAL: [0.5, -1.0], EDGE: [2.0, -2.0, -0.0, *TINY], ABSURD: [NAN, INF, -INF, 2.1, -1e39, 1e39, 10**30]}
FLAGS = {USUAL: [True, False], EDGE: [0, 1], ABSURD: [2, -1, NAN, *OTHER_TYPES]}
WORDS = {
    USUAL: [[","], [" the", "heron"], "the"],
    EDGE: [[], ["a"] * 3, *([one] for one in TEXTS), [LONG_TEXTS[0]]],
    ABSURD: [
        *([""], ["a", ""], [1], 1, [None], {}, "\ud800", [["a"]]),
        *([one] for one in SURROGATES + LONG_TEXTS),
        *({"$repeat": [["a"], 17]}, {"$repeat": [["ab", "cd"], 2_000]}),
    ],
}
NAMES = {
    USUAL: ["sky", "p-1"],
    EDGE: ["0", *(text for text in TEXTS if isinstance(text, str)), {"$repeat": ["a", 10_000]}, 7, 2**70, -1],
    ABSURD: ["", *SURROGATES, {"$repeat": ["a", 1_000_000]}, None, True, 1.5, [], {}],
}
FEATURES = {
    USUAL: [None],
    EDGE: [{"mm_hashes": {}, "mm_placeholders": {}}],
    ABSURD: [
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 2}]}},
        {
            "mm_hashes": {"image": ["a"]},
            "mm_placeholders": {"image": [{"offset": 0, "length": 2}]},
            "kwargs_data": {"image": ["gAAA"]},
        },
        {
            "mm_hashes": {"image": ["a"]},
            "mm_placeholders": {"image": [{"offset": 0, "length": 2**40}]},
            "kwargs_data": {"image": ["====\ud800"]},
        },
        *OTHER_TYPES,
    ],
}

SAMPLING: dict[str, dict[str, list]] = {
    "temperature": {
        USUAL: [0.0, 0.7, 1.0],
        EDGE: [-0.0, 2.0, 100.0, *TINY, 1e-3, 3e38],
        ABSURD: [NAN, INF, -INF, -1.0, -1e-9, 1e39, 1e308, 10**30, "hot", None],
    },
    "top_p": SHARES,
    "min_p": SHARES,
    "top_k": {
        USUAL: [1, 20],
        EDGE: [-1, 0, VOCABULARY - 1, VOCABULARY, VOCABULARY + 1, 2**31 - 1],
        ABSURD: SIZES[ABSURD],
    },
    "stop_token_ids": TOKEN_LISTS,
    "stop": WORDS,
    "ignore_eos": FLAGS,
    "min_tokens": {USUAL: [1, 3], EDGE: [0, 12, CONTEXT_TOKENS, 10**6, 2**31 - 1], ABSURD: SIZES[ABSURD]},
    "bad_words": WORDS,
    "allowed_token_ids": {
        USUAL: [[504, 2365, 355, 260]],
        EDGE: [[EOS], [260], [0], [VOCABULARY - 1], {"$repeat": [[260], 50_000]}],
        ABSURD: [*TOKEN_LISTS[ABSURD], []],
    },
    "logit_bias": {
        USUAL: [{"260": 4.0, "28": -100.0}],
        EDGE: [
            {},
            {"0": 100},
            {str(EOS): -100.0},
            {str(VOCABULARY - 1): 100.0},
            {"260": -0.0},
            [[260, 100], [260, 100]],
        ],
        ABSURD: [{"260": value} for value in (NAN, INF, -INF, 100.1, -1e39, 1e308, None, "x", 10**400)]
        + [{str(token): 1.0} for token in (VOCABULARY, -1, 2**31, 2**63, 10**30, "x")]
        + [[[260]], [260], [[260, 1, 2]], "x", 7],
    },
    "repetition_penalty": {
        USUAL: [1.2, 0.8],
        EDGE: [1.0, 100.0, *TINY, 1e-3],
        ABSURD: [0.0, -0.0, -1.0, NAN, INF, 101.0, 1e39, 10**30],
    },
    "presence_penalty": PENALTIES,
    "frequency_penalty": PENALTIES,
    "structured_outputs": FORMS,
    "top_logprobs": {USUAL: [1, 5], EDGE: [0, 128], ABSURD: [129, *SIZES[ABSURD]]},
    "prompt_logprobs": {USUAL: [1, 3], EDGE: [None, 0, 128], ABSURD: [129, *SIZES[ABSURD]]},
    "sampling_mask": FLAGS,
}
"""Fields of deployments.messages.sampling, with values by kind. A test compares the names with its fields."""

GROUP: dict[str, dict[str, list]] = {
    "prompt_id": NAMES,
    "token_ids": {
        USUAL: PROMPTS,
        EDGE: [
            [0],
            [EOS],
            {"$repeat": [[260], CONTEXT_TOKENS - 1]},
            {"$repeat": [[260], CONTEXT_TOKENS]},
            [VOCABULARY - 1],
        ],
        ABSURD: [*TOKEN_LISTS[ABSURD], []],
    },
    "text": {
        USUAL: ["Why is the sky blue?", "1 + 1 ="],
        EDGE: [*TEXTS, " " * 50],
        ABSURD: ["", *SURROGATES, *LONG_TEXTS, 1, [], {}, ["a"]],
    },
    "messages": {
        USUAL: [[{"role": "user", "content": "Hello"}]],
        EDGE: [
            [{"role": "user", "content": ""}],
            [{"role": "no such role", "content": "a"}],
            [{"role": "assistant", "content": "a"}] * 3,
            *([{"role": "user", "content": text}] for text in TEXTS),
            *([{"role": text, "content": "a"}] for text in TEXTS[:6]),
        ],
        ABSURD: [
            [],
            [{}],
            [{"role": "user"}],
            [{"role": "user", "content": None}],
            [{"role": "", "content": "a"}],
            *([{"role": "user", "content": text}] for text in SURROGATES + LONG_TEXTS),
            *([{"role": text, "content": "a"}] for text in SURROGATES),
            *OTHER_TYPES,
        ],
    },
    "samples": {USUAL: [1], EDGE: [2], ABSURD: SIZES[ABSURD]},
    "max_tokens": {USUAL: [4, 12], EDGE: [1, CONTEXT_TOKENS, 10**6, 2**31 - 1], ABSURD: [0, *SIZES[ABSURD]]},
    "sampling": {USUAL: [{}], EDGE: [{}], ABSURD: [{"no_such_field": 1}, {"n": 2}, {"best_of": 1}, *OTHER_TYPES]},
    "adapter": {USUAL: [None], EDGE: ["no-such-adapter"], ABSURD: ["", *SURROGATES, *LONG_TEXTS, *OTHER_TYPES]},
    "forced_token_ids": {
        USUAL: [[[504, 2365, 355]]],
        EDGE: [[[]], [[EOS]], [[0, VOCABULARY - 1]], [{"$repeat": [[260], 1_000]}]],
        ABSURD: [*([one] for one in TOKEN_LISTS[ABSURD]), [], [[1], [2]], *OTHER_TYPES],
    },
    "features": FEATURES,
    "prediction": {
        USUAL: [None, {"number": 7.5, "quality": 0.9}],
        EDGE: [{"number": 1e308, "quality": 0.0}, {"number": -1e308, "quality": 1.0}],
        ABSURD: [{}, {"number": NAN, "quality": 0.5}, {"number": INF, "quality": 0.5}, *OTHER_TYPES],
    },
}
"""Fields of PromptGroup, in deployments.messages.rollout."""

SESSION_FIELDS: dict[str, dict[str, list]] = {
    "index": {USUAL: [0, 3], EDGE: [2**31 - 1], ABSURD: SIZES[ABSURD]},
    "of": {USUAL: [None, 4], EDGE: [1, 2**31 - 1], ABSURD: [0, *SIZES[ABSURD]]},
    "together": {USUAL: [1], EDGE: [2**31 - 1], ABSURD: SIZES[ABSURD]},
    "chunk_tokens": {USUAL: [None, 4], EDGE: [1, 2**31 - 1], ABSURD: [0, *SIZES[ABSURD]]},
    "deadline_s": {USUAL: [None, 60.0], EDGE: [1e-9, 5e-324, 1e39], ABSURD: [0.0, NAN, INF, *SIZES[ABSURD]]},
    "turn": {USUAL: [0], EDGE: [1, 2**31 - 1], ABSURD: SIZES[ABSURD]},
    "hold_s": {USUAL: [0.0], EDGE: [3600.0, 5e-324], ABSURD: [NAN, INF, 3601.0, *SIZES[ABSURD]]},
    "branches": {USUAL: [False], EDGE: [True, 0, 1], ABSURD: FLAGS[ABSURD]},
}
"""Fields of SampleRequest, in deployments.messages.session."""

BATCH_FIELDS: dict[str, dict[str, list]] = {
    "batch_id": NAMES,
    "step": {USUAL: [0, 3], EDGE: [2**31, 2**63, 10**30], ABSURD: [-1, *OTHER_TYPES]},
    "seed": {USUAL: [0, 7], EDGE: [2**31, 2**63, 10**30], ABSURD: [-1, 1e39, *OTHER_TYPES]},
    "priority": {USUAL: [0, 1], EDGE: BIG, ABSURD: OTHER_TYPES},
    "share": {USUAL: [1.0], EDGE: [*TINY, 1e308], ABSURD: [0.0, NAN, *HUGE, *OTHER_TYPES]},
    "weights_version": {USUAL: [None, 0], EDGE: [], ABSURD: [-1, NAN, "x", 2**70]},
    "min_weights_version": {USUAL: [0], EDGE: [], ABSURD: [-1, NAN, "x", None]},
    "min_adapter_versions": {USUAL: [{}], EDGE: [{"a": 1}], ABSURD: [{"a": "x"}, [], None, {"\ud800": 1}]},
    "traceparent": {USUAL: [None], EDGE: ["00-" + "0" * 32 + "-" + "0" * 16 + "-00"], ABSURD: ["x", *SURROGATES, 1]},
    "keep_trace": FLAGS,
}
"""Fields of BatchSettings, in deployments.messages.rollout."""

CHUNK: dict[str, dict[str, list]] = {
    "chunk_id": {USUAL: ["odd"], EDGE: NAMES[EDGE], ABSURD: ["", *SURROGATES, "mate-0", None, 7, [], {}]},
    "sample_key": {USUAL: [1, 7], EDGE: [0, 2**64 - 1], ABSURD: [-1, 2**64, 10**30, 1.5, NAN, None, "x"]},
    "token_ids": GROUP["token_ids"],
    "prompt_tokens": {USUAL: [], EDGE: [1], ABSURD: [0, -1, 1_000, 2**31, 2**63, 1.5, NAN, None, "x"]},
    "max_tokens": {USUAL: [4, 12], EDGE: [1, CONTEXT_TOKENS, 2**31 - 1], ABSURD: [0, *SIZES[ABSURD]]},
    "weights_version": {USUAL: [0], EDGE: [0], ABSURD: [1, -1, 2**63, 2**64, NAN, None, "x"]},
    "weights_digest": {USUAL: [""], EDGE: ["0" * 16], ABSURD: [*SURROGATES, None, 7]},
    "turn_start": {USUAL: [0], EDGE: [1], ABSURD: [-1, 1_000, 2**31, 2**63, 1.5, NAN, None, "x"]},
    "routes_from": {USUAL: [0], EDGE: [1], ABSURD: [-1, 1_000, 2**31, 2**63, 1.5, NAN, None, "x"]},
    "forced": {USUAL: [None, [504, 2365]], EDGE: [[], [EOS]], ABSURD: TOKEN_LISTS[ABSURD]},
    "adapter": {USUAL: [None], EDGE: [["a", 1, "0" * 16, "/nowhere"]], ABSURD: [["\ud800", -1, "", ""], [], "x", 7]},
    "traceparent": {USUAL: [None], EDGE: ["x"], ABSURD: [7, *SURROGATES]},
    "keep_trace": FLAGS,
    "sampling": {USUAL: [{}], EDGE: [{}], ABSURD: [None, "x", 7]},
    "features": {USUAL: [None], EDGE: [[]], ABSURD: [[["image", 0, 2]], [["\ud800", -1, 2**63]], "x"]},
    "draft": {
        USUAL: [{}],
        EDGE: [{"index": 2**31 - 1}, {"expected": 0}],
        ABSURD: [{"index": -1}, {"index": 2**40}, {"expected": -1}, {"tokens": 10**6}, {"tokens": -1}],
    },
}
"""Fields of ChunkRequest, in deployments.messages.chunk. `draft`: arguments of the plan of drafts, see entry.py."""
