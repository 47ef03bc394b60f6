"""Diffusers: `python examples/trainers/diffusers_loop.py`.

A step of unconditional training: noise is added to images, and the model predicts it. The last
batch, of two images, gets a plan of its own.
"""

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel

import remat

torch.manual_seed(0)
model = UNet2DModel(
    sample_size=16,
    block_out_channels=(32, 64),
    layers_per_block=1,
    norm_num_groups=8,
    attention_head_dim=8,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)
data = torch.utils.data.TensorDataset(torch.randn(10, 3, 16, 16))

model = remat.rematerialize(model, budget="70%")  # the one line

accelerator = Accelerator(cpu=True)
noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for (clean_images,) in loader:
    noise = torch.randn_like(clean_images)
    timesteps = torch.randint(0, 1000, (len(clean_images),))
    noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
    with accelerator.accumulate(model):
        noise_pred = model(noisy_images, timesteps, return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(noise_pred, noise)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
print(losses)
