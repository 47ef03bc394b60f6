"""Image models: timm's, and a U-Net for segmentation."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from tests.zoo.case import Case, Entry, classes, labelled

TIMM = (
    "resnet50", "regnety_002", "convnext_atto", "densenet121", "mobilenetv3_large_100",
    "efficientnet_b0", "mixer_s32_224", "swin_tiny_patch4_window7_224", "vit_tiny_patch16_224",
)  # fmt: skip
TRANSFORMERS = ("mixer_s32_224", "swin_tiny_patch4_window7_224", "vit_tiny_patch16_224")


def _timm(name: str) -> Case:
    import timm

    size = {"img_size": 64} if name in TRANSFORMERS else {}
    return labelled(timm.create_model(name, pretrained=False, num_classes=10, **size).train())


class DoubleConvolution(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for width in (inputs, outputs):
            convolution = nn.Conv2d(width, outputs, 3, padding=1)
            layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        super().__init__(*layers)


class UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (16, 32, 64), n_classes: int = 5) -> None:
        super().__init__()
        pairs = list(zip((3, *widths), widths, strict=False))
        self.down = nn.ModuleList(DoubleConvolution(a, b) for a, b in pairs)
        turns = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in turns)
        self.merge = nn.ModuleList(DoubleConvolution(2 * b, b) for _, b in turns)
        self.head = nn.Conv2d(widths[0], n_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for i, down in enumerate(self.down):
            x = down(nn.functional.max_pool2d(x, 2) if i else x)
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, skips[-2::-1], strict=True):
            x = merge(torch.cat([up(x), skip], 1))
        return self.head(x)


def unet() -> Case:
    images, labels = torch.randn(2, 3, 32, 32), torch.randint(5, (2, 32, 32))
    return Case(UNet(), (images,), loss_fn=classes, target=labels)


ENTRIES = {
    **{f"timm {name}": Entry(functools.partial(_timm, name), "timm") for name in TIMM},
    "segmentation U-Net": Entry(unet),
}
