"""LPIPS: likeness to a target in the features of a network."""

import torch
import torch.nn.functional as F

from reward_models import lend_gpu, load_weights
from rewards import against_targets


# Written out here because the usual packages need torchvision, of which they use only five
# convolutions of AlexNet.
class Lpips(torch.nn.Module):
    """Negative LPIPS 0.1, 0 for a perfect copy (Zhang et al. 2018, eq. 1), from 32x32 pixels on."""

    def __init__(self, alexnet, heads):
        super().__init__()
        alexnet = load_weights(alexnet, "alexnet-owt-7be5be79.pth")
        heads = load_weights(heads, "alex.pth")
        self.layers = torch.nn.ModuleList()
        for i, n in enumerate((0, 3, 6, 8, 10)):
            weights = [alexnet[f"features.{n}.{name}"] for name in ("weight", "bias")]
            weights.append(heads[f"lin{i}.model.1.weight"])  # (1, channels, 1, 1)
            self.layers.append(torch.nn.ParameterList(weights))

    def forward(self, images, targets):
        with lend_gpu(self) as device:
            measure = lambda a, b: -self.distance(a.to(device), b.to(device))
            return against_targets(measure, images, targets)

    def distance(self, a, b):
        """(3, H, W) twice, values in 0..1 -> scalar: weighted differences of unit features."""
        constants = torch.tensor([[-0.030, -0.088, -0.188], [0.458, 0.448, 0.450]])
        shift, scale = constants.to(a).view(2, 3, 1, 1)
        x = (torch.stack([a, b]) * 2 - 1 - shift) / scale
        total = 0
        for n, (kernel, bias, head) in enumerate(self.layers):
            x = F.max_pool2d(x, 3, stride=2) if n in (1, 2) else x
            sizes = {"stride": (4, 1, 1, 1, 1)[n], "padding": (2, 2, 1, 1, 1)[n]}
            x = F.conv2d(x, kernel, bias, **sizes).relu()  # (2, C, h, w)
            unit = x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)
            total += F.conv2d((unit[:1] - unit[1:]).square(), head).mean()
        return total
