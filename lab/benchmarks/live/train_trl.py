"""TRL's own trainer and generation over recorded answers, on the same cores. Called by `train`.

Transformers generates the answers. A logits processor forces the recorded token, so the work is that of sampling.
"""

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from datasets import Dataset
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tailrace.app.model import resolve_model
from tailrace.app.train.question_order import QuestionOrder
from tailrace.app.train.task import read_task
from tailrace.lab.benchmarks.live.recorded_rewards import reward
from tailrace.lab.benchmarks.live.train import TrainingReplay


class RecordedTokens(LogitsProcessor):
    """Logits processor that forces recorded answers. `answers`: rows of token ids, in the order of the batch.
    `prompt_tokens`: number of columns before the first answer token. `end`: token after a row's last.
    """

    def __init__(self, answers: list[tuple[int, ...]], prompt_tokens: int, end: int):
        self._answers, self._prompt_tokens, self._end = answers, prompt_tokens, end

    def __call__(self, input_ids, scores):
        place = input_ids.shape[1] - self._prompt_tokens
        tokens = [answer[place] if place < len(answer) else self._end for answer in self._answers]
        forced = torch.full_like(scores, -torch.inf)
        return forced.scatter(1, torch.tensor(tokens, device=scores.device)[:, None], 0.0)


class StepSeconds(TrainerCallback):
    """Callback that records the seconds of each step."""

    def __init__(self):
        self.seconds: list[float] = []

    def on_step_begin(self, args, state, control, **_):
        self._began_s = time.monotonic()

    def on_step_end(self, args, state, control, **_):
        self.seconds.append(time.monotonic() - self._began_s)


def trl_step_s(replay: TrainingReplay, model: str, folder: Path) -> float:
    """Runs TRL's trainer, and returns the mean seconds of a step after the first."""
    model = str(resolve_model(model))
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = replay.config(model, "sync", 1)
    order = QuestionOrder(read_task(config.task).train, replay.groups, config.seed)
    questions = [question for step in range(replay.steps + 1) for question in order.of(step)]
    seconds = StepSeconds()
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda completions, answer, **_: list(map(partial(reward, ""), completions, answer)),
        args=GRPOConfig(
            output_dir=str(folder),
            max_steps=replay.steps + 1,
            num_generations=replay.samples,
            per_device_train_batch_size=replay.samples,
            gradient_accumulation_steps=replay.groups,
            max_completion_length=replay.max_tokens,
            learning_rate=config.learning_rate,
            shuffle_dataset=False,
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": each.prompt, "answer": each.answer} for each in questions]),
        processing_class=tokenizer,
        callbacks=[seconds],
    )
    _replay(trainer.model, tokenizer, replay.answers)
    trainer.train()
    return round(mean(seconds.seconds[1:]), 2)


def _replay(model, tokenizer, answers: Mapping[tuple[int, ...], tuple[tuple[int, ...], ...]]) -> None:
    """Makes `model.generate` replay the recorded answers. A prompt is repeated once for each of its answers."""
    generate = model.generate

    def replayed(input_ids, attention_mask, **options):
        prompts = [tuple(row[mask.bool()].tolist()) for row, mask in zip(input_ids, attention_mask, strict=True)]
        seen = {prompt: iter(answers[prompt]) for prompt in set(prompts)}
        rows = [next(seen[prompt]) for prompt in prompts]
        recorded = RecordedTokens(rows, input_ids.shape[1], tokenizer.eos_token_id)
        processors = LogitsProcessorList([recorded])
        return generate(input_ids=input_ids, attention_mask=attention_mask, logits_processor=processors, **options)

    model.generate = replayed
