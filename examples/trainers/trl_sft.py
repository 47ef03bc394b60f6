"""TRL's `SFTTrainer`: `python examples/trainers/trl_sft.py`.

TRL puts a forward of its own on the model. It calls the backbone, and computes the loss from what
that returns, in chunks, so the backbone is what is planned. GPT-2's is ``model.transformer``;
Llama's and most others' is ``model.model``.
"""

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import remat

FOLDER = "build/trl_sft"  # what the trainer writes

torch.manual_seed(0)
words = Tokenizer(WordLevel({word: i for i, word in enumerate("_abcdefghijklmno")}, unk_token="_"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="_", eos_token="_")
sizes = {"vocab_size": 16, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
data = Dataset.from_dict({"input_ids": torch.randint(1, 16, (40, 24)).tolist()})

model.transformer = remat.rematerialize(model.transformer, budget="70%")  # the one line

arguments = SFTConfig(
    output_dir=FOLDER,
    per_device_train_batch_size=16,
    num_train_epochs=2,
    gradient_checkpointing=False,
    logging_steps=1,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
)
trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
trainer.save_model(FOLDER)
print(losses)
