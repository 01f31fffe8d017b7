"""The demo model speaks."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_the_demo_model_speaks_and_is_float32(model_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True, dtype="auto")
    assert model.dtype == torch.float32 and model.num_parameters() == 134_515_008
    chat = [{"role": "user", "content": "What is the capital of Norway?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Oslo" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
