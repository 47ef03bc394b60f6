"""FSDP2, as torchtitan uses it: `torchrun --nproc-per-node 2 examples/trainers/fsdp2_loop.py`.

The plan takes the place of activation checkpointing: one for each layer, before `fully_shard`. The
rate of learning warms up, gradients are clipped by their norm over all ranks, and the first rank
gets the whole weights, as for a checkpoint.
"""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import remat

VOCABULARY, WIDTH, HEADS, LAYERS, TOKENS = 64, 64, 4, 4, 32


class Layer(torch.nn.Module):
    """Causal attention and a perceptron, each normed before and added after."""

    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = torch.nn.RMSNorm(WIDTH), torch.nn.RMSNorm(WIDTH)
        self.wqkv = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.wo = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.w1 = torch.nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.w2 = torch.nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        """Of [batch, tokens, width]."""
        qkv = self.wqkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        return x + self.w2(functional.silu(self.w1(self.ffn_norm(x))))


class Decoder(torch.nn.Module):
    """A small decoder with the names of torchtitan's."""

    def __init__(self):
        super().__init__()
        self.tok_embeddings = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleDict({str(i): Layer() for i in range(LAYERS)})
        self.norm = torch.nn.RMSNorm(WIDTH)
        self.output = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        """Logits of the next tokens."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


def loss_fn(logits, labels):
    """The mean over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


dist.init_process_group("gloo")
rank, n_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = Decoder()
torch.manual_seed(1 + rank)
texts = torch.randint(VOCABULARY, (6, 4, TOKENS + 1))
batches = [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in texts]

tokens, labels = batches[0]
planning = {
    "budget": "70%",
    "optimizer": "adamw",
    "loss_fn": loss_fn,
    "target": labels,
    "sharding": remat.Sharding("fsdp2", n_ranks),
    "group": dist.group.WORLD,
}
model = remat.rematerialize(model, (tokens,), blocks="layers.*", **planning)  # the one line

for layer in model.layers.values():
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / 4))
losses = []
for tokens, labels in batches:
    optimizer.zero_grad()
    loss = loss_fn(model(tokens), labels)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    warm_up.step()
    losses.append(loss.item())
whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
weights = get_model_state_dict(model, options=whole)
if rank == 0:
    print(losses, len(weights))
dist.destroy_process_group()
