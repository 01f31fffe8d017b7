"""Whether vLLM's xgrammar backend can keep a form of answers. Called by the coordinator and by engines."""

from tailrace.deployments.messages.sampling import StructuredOutputs


def params(form: dict):
    """Returns vLLM's StructuredOutputsParams of a form, as `StructuredOutputs.model_dump` gives it."""
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(**form)


def refusal(form: StructuredOutputs) -> str | None:
    """Returns in one line why a form cannot be kept, or None. Loads vLLM: 200 MB, and seconds the first time."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    try:
        asked = params(form.model_dump(mode="json", exclude_none=True))
        validate_xgrammar_grammar(SamplingParams(structured_outputs=asked))
    except (ValueError, VLLMClientError) as error:
        return f"structured_outputs: {str(error).splitlines()[0]}"
    return None
