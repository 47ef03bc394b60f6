"""Lightning: `python examples/trainers/lightning_fit.py`.

The line goes into `configure_model`, around the module that `training_step` calls. Lightning calls
that hook before each fit, validation and test, so what it makes is made once.
"""

import lightning
import torch

import remat

FOLDER = "build/lightning_fit"  # what the trainer writes


class Classifier(lightning.LightningModule):
    """Six layers, planned where they are made."""

    def __init__(self):
        super().__init__()
        self.model = None
        self.losses = []

    def configure_model(self):
        """The layers; nothing where they are there, as from an earlier call."""
        if self.model is not None:
            return
        layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)]
        self.model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 8))
        self.model = remat.rematerialize(self.model, budget="60%")  # the one line

    def training_step(self, batch, index):
        """The loss of a batch."""
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.model(x), y)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        """The loss of a batch that is not trained on."""
        x, y = batch
        self.losses.append(torch.nn.functional.cross_entropy(self.model(x), y).item())

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
    num_sanity_val_steps=0,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(classifier, torch.utils.data.DataLoader(data, batch_size=512, shuffle=True))
trainer.validate(classifier, torch.utils.data.DataLoader(data, batch_size=512), verbose=False)
losses = classifier.losses
print(losses)
