"""A `serve.yaml` for a planned way to divide GPUs, in the product's own words.

Invariant: the text is what `app.config.load_config` accepts. Called by `tailrace plan --out`.
"""

from math import ceil

import yaml

from tailrace.app.config import ServeFile
from tailrace.lab.simulator.hardware import MAX_RUNNING, MODELS
from tailrace.lab.simulator.priced_parallelism import PricedParallelism
from tailrace.lab.simulator.scenario import Scenario

MARK = "# Made by `tailrace plan`"
"""First line of such a file, by which it may be written over."""

BLOCK_TOKENS = 16
"""`max_model_len` is whole KV blocks of this size."""

FORM = """\
{mark}: {model} on {gpus} {gpu}, for {workload}.
# By the step model work takes {work_s:.0f} s and the longest sample {longest_s:.0f} s: {total_s:.0f} s, {samples} \
samples a replica.
# docs/planning.md names the model's assumptions. Nothing of this was measured; `tailrace profile` times a real engine.
proxy_location: Disabled
applications:
  - name: tailrace
    import_path: tailrace.app.build:build
    route_prefix: null
    args:
      replicas: {replicas}
      engine:
        model: /models/policy       # the folder of {model}, at the same path on every node
        device: gpu
        dtype: bfloat16
        max_model_len: {max_model_len}
        max_running: {running}
        max_batched_tokens: 16384
        kv_cache_gib: null          # what vLLM finds free
        tensor_parallel: {tensor}
{experts}        draft: {{method: group}}
      pool:
        protocol: rdma
        dram_gib: 256               # per node; what the samples in flight need beyond the replicas' own caches
    deployments:
      - name: Coordinator
        ray_actor_options: {{num_cpus: 2}}
        user_config:
          policies:
            ordering: seer
            placement: cost_aware
            chunking: {{type: fixed, chunk_tokens: {chunk_tokens}}}
            lengths: shrunk
            drafting: goodput
"""
"""As serve.gpu.yaml, with the planned numbers."""

EXPERTS = "        vllm_args: {enable_expert_parallel: true}\n"


def planned_file(way: PricedParallelism, scenario: Scenario, outside_tokens: int = 0) -> str:
    """Returns the text for a way that the service can run. `scenario`: the workload, on the GPUs of the plan.
    `outside_tokens`: maximum tokens that tools add to a sample.

    Raises ValueError for a way that does not fit or that no replica of the service can be.
    """
    if way.costs is None or not way.served:
        raise ValueError(way.problem or "no replica of the service spreads experts over ranks that divide requests")
    longest = scenario.prompt_tokens.value + scenario.max_tokens.value + outside_tokens
    text = FORM.format(
        mark=MARK,
        model=scenario.model.value,
        gpu=scenario.gpu.value,
        gpus=scenario.gpus.value,
        workload=" ".join(scenario.name.split()),
        total_s=way.costs.total_s,
        work_s=way.costs.work_s,
        longest_s=way.costs.longest_s,
        samples=way.costs.samples,
        replicas=way.parallelism.replicas,
        max_model_len=ceil(longest / BLOCK_TOKENS) * BLOCK_TOKENS,
        running=min(way.costs.samples, MAX_RUNNING),
        tensor=way.parallelism.tensor,
        experts=EXPERTS if MODELS[scenario.model.value].experts and way.parallelism.expert > 1 else "",
        chunk_tokens=scenario.chunk_tokens.value,
    )
    ServeFile.model_validate(yaml.safe_load(text))
    return text
