"""TRL's `DPOTrainer`: `python examples/trainers/trl_dpo.py`.

As with `SFTTrainer`, the backbone is what is planned. The reference model is not trained and needs
no plan. It is another model, so make it before the line. Pairs are padded to one length, of which
there is one plan.
"""

import copy
import random

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

import remat

FOLDER = "build/trl_dpo"  # what the trainer writes

torch.manual_seed(0)
words = Tokenizer(WordLevel({word: i for i, word in enumerate("_abcdefghijklmno")}, unk_token="_"))
words.pre_tokenizer = WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="_", eos_token="_")
sizes = {"vocab_size": 16, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
reference = copy.deepcopy(model)
random.seed(0)


def text(most_words):
    """A random text."""
    return "".join(
        f" {c}" for c in random.choices("abcdefghijklmno", k=random.randint(4, most_words))
    )


kinds = {"prompt": 8, "chosen": 12, "rejected": 12}
data = Dataset.from_list([{kind: text(n) for kind, n in kinds.items()} for _ in range(24)])

model.transformer = remat.rematerialize(model.transformer, budget="70%")  # the one line

arguments = DPOConfig(
    output_dir=FOLDER,
    per_device_train_batch_size=8,
    num_train_epochs=2,
    pad_to_multiple_of=24,
    gradient_checkpointing=False,
    logging_steps=1,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
)
trainer = DPOTrainer(model, reference, arguments, train_dataset=data, processing_class=tokenizer)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
trainer.save_model(FOLDER)
print(losses)
