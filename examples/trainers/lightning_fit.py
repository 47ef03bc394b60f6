"""Lightning: `python examples/trainers/lightning_fit.py`.

The line goes into ``__init__`` of the `LightningModule`, around the module that `training_step`
calls. Checkpoints have the same names as without it, and load either way.
"""

import lightning
import torch

import remat

FOLDER = "build/lightning_fit"  # what the trainer writes


class Classifier(lightning.LightningModule):
    """Six layers, planned where they are made."""

    def __init__(self):
        super().__init__()
        layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)]
        self.model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 8))
        self.model = remat.plan_cache(self.model, budget="60%")  # the one line
        self.losses = []

    def training_step(self, batch, index):
        """The loss of a batch."""
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.model(x), y)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        """Over the parameters of the plan, which are those of the model."""
        return torch.optim.AdamW(self.parameters())


lightning.seed_everything(0)
data = torch.utils.data.TensorDataset(torch.randn(1280, 64), torch.randint(8, (1280,)))
classifier = Classifier()
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    default_root_dir=FOLDER,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(classifier, torch.utils.data.DataLoader(data, batch_size=512, shuffle=True))
losses = classifier.losses
print(losses)
