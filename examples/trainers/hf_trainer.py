"""Hugging Face's `Trainer`: `python examples/trainers/hf_trainer.py`.

The loss is computed by the model from ``labels``, so it is part of the plan. The last batch, of two
texts, gets a plan of its own.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import remat

FOLDER = "build/hf_trainer"  # what the trainer writes

torch.manual_seed(0)
sizes = {"vocab_size": 128, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(128, (14, 32))]

model = remat.rematerialize(model, budget="70%")  # the one line

arguments = TrainingArguments(
    output_dir=FOLDER,
    num_train_epochs=1,
    per_device_train_batch_size=4,
    logging_steps=1,
    bf16=True,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
losses.append(trainer.evaluate()["eval_loss"])
trainer.save_model(FOLDER)
print(losses)
