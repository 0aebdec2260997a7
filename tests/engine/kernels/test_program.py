"""Programs: calls in order on every thread, with what each run gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.kernels import team

if team.missing():
    pytest.skip(team.missing(), allow_module_level=True)

from engine.kernels import rows
from engine.kernels.program import Program

WIDTH, EPSILON = 64, torch.tensor([1e-5])


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_call_sees_all_of_the_one_before(threads: int) -> None:
    """Norms of many rows, then gates over few long rows, each of which holds many of them: whoever doesn't wait for the
    others reads what isn't there yet."""
    torch.set_num_threads(threads)
    weight = torch.rand(WIDTH)
    first, second, third = torch.empty(256, WIDTH), torch.empty(4, 32 * WIDTH), torch.empty(128, WIDTH)
    x = torch.empty(256, WIDTH)
    places = weight.data_ptr(), EPSILON.data_ptr()
    program = Program(
        [
            rows.norm_call("rows", "share", WIDTH, x.data_ptr(), places[0], first.data_ptr(), places[1], 0),
            rows.swiglu_call("few", "one", 32 * WIDTH, first.data_ptr(), second.data_ptr()),
            rows.norm_call("half", "share", WIDTH, second.data_ptr(), places[0], third.data_ptr(), places[1], 0),
        ]
    )
    for _ in range(50):
        x.copy_(torch.randn(256, WIDTH))
        program.run({"rows": 256, "share": 3, "few": 4, "one": 1, "half": 128})
        gated = rows.swiglu(rows.norm(x, weight, EPSILON).view(4, 64 * WIDTH))
        assert torch.equal(third, rows.norm(gated.view(128, WIDTH), weight, EPSILON))


def test_what_a_run_gives_is_taken_and_what_it_lacks_is_named() -> None:
    weight, x, out = torch.rand(WIDTH), torch.randn(8, WIDTH), torch.zeros(8, WIDTH)
    places = x.data_ptr(), weight.data_ptr(), out.data_ptr(), EPSILON.data_ptr()
    program = Program([rows.norm_call("rows", "share", WIDTH, *places, 0)])
    program.run({"rows": 3, "share": 1})
    assert torch.equal(out[:3], rows.norm(x[:3], weight, EPSILON))
    assert torch.equal(out[3:], torch.zeros(5, WIDTH))
    with pytest.raises(KeyError, match="share"):
        program.run({"rows": 8})
