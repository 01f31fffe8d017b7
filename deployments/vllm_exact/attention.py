"""The attention backend of an engine: vLLM's own choice, or at `exactness: bits` on GPUs one whose rows are invariant.

vLLM's choice on Hopper, FlashAttention 3, tiles its rows by the longest query of the batch (vLLM 51902). Triton's and
FlashAttention 2's rows do not depend on their batch. Used by launch.py and engine_config.py.
"""

from collections.abc import Mapping
from typing import Any

from tailrace.deployments.keyed_error import KeyedError

INVARIANT = {
    "backend": "TRITON_ATTN",
    "backend_per_kind": {"mla_attention": "TRITON_MLA", "sliding_window_mla": "TRITON_MLA"},
}
"""Settings for vLLM's AttentionConfig: backends that vLLM declares invariant and that read nothing of the batch."""

FLASH, FLASH_VERSION = "FLASH_ATTN", 2
"""vLLM's name of FlashAttention, and its version whose rows are invariant."""


def named_backend(given: Mapping[str, Any]) -> str | None:
    """Returns the backend that arguments for EngineArgs name, as vLLM writes it, or None if they leave the choice."""
    named = given.get("attention_backend") or _config_of(given).get("backend")
    text = str(getattr(named, "name", named or "auto")).upper()
    return None if text == "AUTO" else text


def check_invariant(given: Mapping[str, Any]) -> None:
    """Raises KeyedError if arguments for EngineArgs name FlashAttention without the version that is invariant."""
    key = "attention_backend" if given.get("attention_backend") else "attention_config"
    version = _config_of(given).get("flash_attn_version")
    of_kinds = (_config_of(given).get("backend_per_kind") or {}).values()
    names_flash = FLASH in {named_backend(given), *(str(getattr(kind, "name", kind)).upper() for kind in of_kinds)}
    if version not in (None, FLASH_VERSION) or (names_flash and version is None):
        found = f"FlashAttention {version or 3}"
        mend = f"write attention_config: {{backend: {FLASH}, flash_attn_version: {FLASH_VERSION}}}, or exactness: law"
        raise KeyedError(f"vllm_args.{key}", f"{found} depends on the batch, which exactness: bits refuses; {mend}")


def invariant_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments for EngineArgs that choose an invariant backend; none if the given ones name one."""
    return {} if named_backend(given) else {"attention_config": INVARIANT | _config_of(given, but="backend")}


def _config_of(given: Mapping[str, Any], but: str = "") -> dict[str, Any]:
    """Returns the settings for AttentionConfig that the arguments have, a mapping or an object of that class."""
    config = given.get("attention_config") or {}
    settings = config if isinstance(config, Mapping) else vars(config)
    return {name: value for name, value in settings.items() if name != but and value is not None}
