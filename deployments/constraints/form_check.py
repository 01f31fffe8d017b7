"""Checks in a separate process whether an answer can have a form: some forms compile for ever, or use all memory.

Owns that process, which loads vLLM and the tokenizer at the first form (seconds, 700 MB), and forks for each form; the
fork has limits. Invariant: whatever a form does there, the check answers in one line. A check that was ended from
outside raises: `Prompts`, which keeps answers, does not keep that. It calls `FormCheck` on threads; `form_refusal` is
called by engines too.
"""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from tailrace.deployments.messages.sampling import StructuredOutputs

COMPILE_S = 5
"""Maximum seconds of processor time for one form: as long as vLLM waits for a regular expression. An engine compiles
the form again, and its other samples wait meanwhile.
"""

COMPILE_BYTES = 2 << 30
"""Maximum bytes of memory for one form."""

TOO_LARGE = "it takes too long or too much memory to compile; give a smaller one"
XGRAMMARS_PLACE = re.compile(r"\[[\d:]+\] \S+: ")
"""Time and source line that xgrammar puts before its errors."""

MAX_CHARACTERS = 300
"""Maximum number of characters of a reason: some quote the form."""

NO_ANSWER = "it allows no answer"


class FormCheck:
    """`model`: the folder of the tokenizer and its configuration. `compile_s`: as COMPILE_S."""

    def __init__(self, model: str, compile_s: float = COMPILE_S):
        self._model, self._compile_s, self._lock = model, compile_s, threading.Lock()
        self._process: subprocess.Popen | None = None

    def refusal(self, form: StructuredOutputs, stops: Sequence[int]) -> str | None:
        """Returns in one line why no answer can have a form, or None. Raises ValueError, one line, if the process has
        ended. `stops`: tokens that end an answer.
        """
        asked = form.model_dump(mode="json", exclude_none=True)
        with self._lock:
            reason = self._ask({"form": asked, "stops": list(stops)})
        return None if reason is None else f"structured_outputs: {reason.removeprefix('structured_outputs: ')}"

    def _ask(self, question: dict) -> str | None:
        if self._process is None or self._process.poll() is not None:
            module, limit = "tailrace.deployments.constraints.form_check", str(self._compile_s)
            command = [sys.executable, "-m", module, self._model, limit]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            ended = f"the process that checks forms has ended ({self._process.wait()})"
            raise ValueError(f"structured_outputs: {ended}; send the request again")
        return json.loads(line)

    def close(self) -> None:
        if self._process is not None:
            self._process.stdin.close()  # it ends with its input
            self._process.wait()
            self._process.stdout.close()


def form_refusal(form: StructuredOutputs) -> str | None:
    """Returns in one line why vLLM's xgrammar backend cannot keep a form, or None. Compiles nothing."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    try:
        asked = StructuredOutputsParams(**form.model_dump(mode="json", exclude_none=True))
        validate_xgrammar_grammar(SamplingParams(structured_outputs=asked))
    except (ValueError, VLLMClientError) as error:
        return f"structured_outputs: {str(error).splitlines()[0]}"
    return None


def main(model: str, compile_s: float) -> None:
    """Answers each line of input with a line of JSON, until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's log goes to standard output
    from tailrace.deployments.constraints.answer_forms import FormCompiler

    compiler = FormCompiler.of_folder(model)
    limit_bytes = _mapped_bytes() + COMPILE_BYTES
    for line in sys.stdin:
        answers.write(json.dumps(_in_fork(compiler, json.loads(line), compile_s, limit_bytes)) + "\n")
        answers.flush()


def _in_fork(compiler, question: dict, compile_s: float, limit_bytes: int) -> str | None:
    """Checks a form in a fork, which may be ended by its limits. Returns the reason of a refusal, or None. Ends this
    process if the fork was killed.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _answer(compiler, question, compile_s, limit_bytes, writing)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        sys.exit("the check of a form was killed")  # by no limit of its own: the node may lack memory
    return json.loads(text) if text and status == 0 else TOO_LARGE


def _answer(compiler, question: dict, compile_s: float, limit_bytes: int, writing: int) -> NoReturn:
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # xgrammar warns there, again and again
        signal.setitimer(signal.ITIMER_PROF, compile_s)  # its signal ends the process, whatever it does
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.write(writing, json.dumps(_reason(compiler, **question)).encode())
        status = 0
    except MemoryError:
        os.write(writing, json.dumps(TOO_LARGE).encode())
        status = 0
    finally:
        os._exit(status)


def _reason(compiler, form: dict, stops: list[int]) -> str | None:
    try:
        if (reason := form_refusal(StructuredOutputs(**form))) is None:
            return None if compiler.start(form, stops).allows_any() else NO_ANSWER
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - xgrammar's and vLLM's refusals have many types
        reason = str(error) or type(error).__name__
    lines = (line.strip() for line in XGRAMMARS_PLACE.sub("", reason).splitlines())
    return next(filter(None, lines), NO_ANSWER)[:MAX_CHARACTERS]


def _mapped_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        main(sys.argv[1], float(sys.argv[2]))
