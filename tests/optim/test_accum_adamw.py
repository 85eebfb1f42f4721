"""AccumAdamW: AdamW where it takes in one gradient at a time, and where it takes in more, its equation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal

SHAPE = (3, 4)


def gradients(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(count)]


def stepped(optimizer: torch.optim.Optimizer, param: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach().clone()


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64).view(SHAPE))


def test_one_gradient_per_update_equals_adamw() -> None:
    ours, torchs = parameter(), parameter()
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    result = stepped(shoal.optim.AccumAdamW([ours], accumulate=1, **options), ours, gradients(7))
    torch.testing.assert_close(result, stepped(torch.optim.AdamW([torchs], **options), torchs, gradients(7)))


def test_moments_use_the_mean_of_several_gradients_and_betas_raised_to_their_number() -> None:
    param, (beta1, beta2), every, lr, eps, decay = parameter(), (0.8, 0.99), 3, 0.01, 1e-6, 0.1
    x, m, v, b = param.detach().clone(), *(torch.zeros(SHAPE, dtype=torch.float64) for _ in range(3))
    for t, g in enumerate(gradients(8), 1):
        k = -(-t // every)
        p = beta1**every * m + (1 - beta1**every) * g
        q = beta2**every * v + (1 - beta2**every) * g**2
        step = p / (1 - beta1 ** (every * k)) / ((q / (1 - beta2 ** (every * k))).sqrt() + eps)
        x = (1 - lr * decay) * x - lr * step
        b = b + g / every
        if t % every == 0:
            m = beta1**every * m + (1 - beta1**every) * b
            v = beta2**every * v + (1 - beta2**every) * b**2
            b = torch.zeros_like(b)
    adam = shoal.optim.AccumAdamW([param], lr, accumulate=every, betas=(beta1, beta2), eps=eps, weight_decay=decay)
    torch.testing.assert_close(stepped(adam, param, gradients(8)), x)


def test_noisy_gradients_are_divided_by_the_root_of_their_count() -> None:
    """AdamW on the mean over so many agents' gradients has the same denominator; plain AdamW's is twice as large."""
    generator = torch.Generator().manual_seed(1)
    param = torch.nn.Parameter(torch.zeros(4000))
    adam = shoal.optim.AccumAdamW([param], 0.0, accumulate=4, betas=(0.9, 0.99), weight_decay=0.0)
    for _ in range(800):
        param.grad = torch.randn(4000, generator=generator)
        adam.step()
    assert adam.state[param]["exp_avg_sq"].mean().sqrt().item() == pytest.approx(0.5, rel=0.02)


def test_a_loaded_state_resumes_between_two_updates() -> None:
    full, param, again = parameter(), parameter(), parameter()
    expected = stepped(shoal.optim.AccumAdamW([full], accumulate=3), full, gradients(8))
    first = shoal.optim.AccumAdamW([param], accumulate=3)
    stepped(first, param, gradients(8)[:4])
    again.data.copy_(param)
    second = shoal.optim.AccumAdamW([again], accumulate=3)
    second.load_state_dict(first.state_dict())
    assert torch.equal(stepped(second, again, gradients(8)[4:]), expected)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"accumulate": 0}, "accumulate=0"),
        ({"accumulate": 2, "lr": -1.0}, "lr=-1"),
        ({"accumulate": 2, "betas": (0.9, 1.0)}, "betas"),
        ({"accumulate": 2, "eps": 0.0}, "eps=0"),
        ({"accumulate": 2, "weight_decay": -0.1}, "weight_decay=-0.1"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        shoal.optim.AccumAdamW([parameter()], **options)
    for count in (1.5, float("nan"), "3", True):
        with pytest.raises(TypeError, match="accumulate must be an int"):
            shoal.optim.AccumAdamW([parameter()], accumulate=count)  # type: ignore[arg-type]


def test_second_moments_can_be_mixed() -> None:
    def agent() -> torch.Tensor:
        model = torch.nn.Linear(3, 1)
        adam = shoal.optim.AccumAdamW(model.parameters(), accumulate=2)
        optimizer = shoal.DecentralizedOptimizer(adam, model, mix_state=("exp_avg_sq",))
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.ones(3)) * (1 + shoal.rank())).backward()
            optimizer.step()
        return adam.state[model.weight]["exp_avg_sq"].clone()

    first, second = shoal.Fleet(2, timeout=20.0).run(agent)
    assert torch.equal(first, second)
    expected = (1 - 0.999**2) * (1**2 + 2**2) / 2
    assert first.flatten().tolist() == pytest.approx([expected] * 3, rel=1e-4)
