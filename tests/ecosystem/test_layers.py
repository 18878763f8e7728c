"""Libraries of layers and models, called as their examples do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .common import Call, same_training


def test_einops() -> None:
    from einops import einsum, rearrange
    from einops.layers.torch import Rearrange, Reduce

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut = Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4)
            self.inner = nn.Linear(48, 16)
            self.mean = Reduce("b n c -> b c", "mean")

        def forward(self, pictures: Tensor) -> Tensor:
            seen = rearrange(self.inner(self.cut(pictures)), "b n (h d) -> b h n d", h=2)
            scores = einsum(seen, seen, "b h i d, b h j d -> b h i j").softmax(-1)
            return self.mean(rearrange(scores @ seen, "b h n d -> b n (h d)"))

    same_training(Model, lambda call: call(torch.randn(2, 3, 8, 8)).pow(2).mean())


def test_x_transformers() -> None:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    def make() -> nn.Module:
        layers = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, rotary_pos_emb=True, ff_dropout=0.1)
        return AutoregressiveWrapper(TransformerWrapper(num_tokens=32, max_seq_len=16, attn_layers=layers))

    same_training(make, lambda call: call(torch.randint(0, 32, (2, 16))), tolerance=1e-5)


def test_linear_attention_transformer() -> None:
    from linear_attention_transformer import LinearAttentionTransformerLM

    def make() -> nn.Module:
        return LinearAttentionTransformerLM(
            num_tokens=32, dim=16, heads=2, depth=1, max_seq_len=16, causal=False, local_attn_window_size=8
        )

    same_training(make, lambda call: call(torch.randint(0, 32, (2, 16))).pow(2).mean(), tolerance=1e-5)


def test_vector_quantize() -> None:
    from vector_quantize_pytorch import FSQ

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(6, 3), nn.Linear(3, 6)
            self.steps = FSQ([5, 4, 3])

        def forward(self, x: Tensor) -> Tensor:
            codes, _ = self.steps(self.before(x))
            return (self.after(codes) - x).pow(2).mean()

    same_training(Model, lambda call: call(torch.randn(2, 7, 6)))


def test_diffusers() -> None:
    """The noise in noised pictures is what the network learns to tell."""
    from diffusers import DDPMScheduler, UNet2DModel

    def make() -> nn.Module:
        return UNet2DModel(
            sample_size=8,
            in_channels=1,
            out_channels=1,
            layers_per_block=1,
            block_out_channels=(8, 16),
            norm_num_groups=4,
            attention_head_dim=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )

    scheduler = DDPMScheduler(num_train_timesteps=50)

    def loss_of(call: Call) -> Tensor:
        clean, noise = torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8)
        times = torch.randint(0, 50, (2,))
        return nn.functional.mse_loss(call(scheduler.add_noise(clean, noise, times), times).sample, noise)

    same_training(make, loss_of, tolerance=1e-5)


def test_neuralop() -> None:
    from neuralop.models import FNO

    def make() -> nn.Module:
        return FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2)

    same_training(make, lambda call: call(torch.randn(2, 1, 8, 8)).pow(2).mean(), tolerance=1e-5)


def test_monai() -> None:
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet

    def make() -> nn.Module:
        return UNet(
            2, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,), num_res_units=1, dropout=0.1
        )

    loss = DiceLoss(to_onehot_y=True, softmax=True)

    def loss_of(call: Call) -> Tensor:
        return loss(call(torch.randn(2, 1, 16, 16)), torch.randint(0, 2, (2, 1, 16, 16)))

    same_training(make, loss_of, tolerance=1e-5)


def test_kornia() -> None:
    """Filters and a warp that can be learned."""
    import kornia

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.warp = nn.Parameter(torch.eye(3)[None, :2] + 0.01 * torch.randn(1, 2, 3))

        def forward(self, x: Tensor) -> Tensor:
            blurred = kornia.filters.gaussian_blur2d(x, (3, 3), (1.0, 1.0))
            moved = kornia.geometry.transform.warp_affine(blurred, self.warp.expand(len(x), -1, -1), (8, 8))
            return kornia.filters.sobel(moved).mean() + kornia.losses.ssim_loss(moved, x, 3)

    same_training(Model, lambda call: call(torch.rand(2, 1, 8, 8)), tolerance=1e-5)


def test_pytorch_tabnet() -> None:
    from pytorch_tabnet.tab_network import TabNet

    def make() -> nn.Module:
        groups = torch.eye(6)
        return TabNet(6, 2, n_d=4, n_a=4, n_steps=2, virtual_batch_size=8, group_attention_matrix=groups)

    def loss_of(call: Call) -> Tensor:
        out, sparsity = call(torch.randn(8, 6))
        return nn.functional.cross_entropy(out, torch.randint(0, 2, (8,))) - 1e-3 * sparsity

    same_training(make, loss_of, tolerance=1e-5)


def test_torch_geometric() -> None:
    """Nodes with neighbours: a convolution, one with attention, and the mean of each graph."""
    from torch_geometric.nn import GATConv, GCNConv, global_mean_pool

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = GCNConv(4, 8), GATConv(8, 4, heads=2, dropout=0.1)

        def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
            return global_mean_pool(self.second(self.first(x, edges).relu(), edges), batch, 2)

    def loss_of(call: Call) -> Tensor:
        edges = torch.randint(0, 6, (2, 14))
        return call(torch.randn(6, 4), edges, torch.tensor([0, 0, 0, 1, 1, 1])).pow(2).mean()

    same_training(Model, loss_of, tolerance=1e-5)


def test_schnet_of_torch_geometric() -> None:
    """A potential: forces are derivatives of what graph layers compute."""
    from torch_geometric.nn.models.schnet import CFConv, GaussianSmearing, ShiftedSoftplus

    from .common import with_forces

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kinds, self.last = nn.Embedding(3, 8), nn.Linear(8, 1)
            self.smear = GaussianSmearing(0.0, 5.0, 6)
            weights = nn.Sequential(nn.Linear(6, 8), ShiftedSoftplus(), nn.Linear(8, 8))
            self.conv = CFConv(8, 8, 8, weights, 5.0)

        def forward(self, kinds: Tensor, positions: Tensor, edges: Tensor) -> Tensor:
            apart = (positions[edges[0]] - positions[edges[1]]).norm(dim=-1)
            return self.last(self.conv(self.kinds(kinds), edges, apart, self.smear(apart))).sum()

    def loss_of(call: Call) -> Tensor:
        positions = torch.randn(5, 3, requires_grad=True)
        edges = torch.tensor([(i, j) for i in range(5) for j in range(5) if i != j]).t()
        return with_forces(call(torch.arange(5) % 3, positions, edges), positions)

    same_training(Model, loss_of, tolerance=1e-5)
