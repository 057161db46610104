"""The GPU checks: in full on a GPU, on toy sizes on a CPU so that their code stays alive."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.measuring import Setting
from tests.gpu.run import CHECKS, run_all


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.timeout(600)
def test_all_bars_are_met_on_a_gpu() -> None:
    assert run_all(Setting(device=torch.device("cuda"), tiny=False))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_check_runs_on_toy_sizes_without_a_gpu() -> None:
    setting = Setting(device=torch.device("cpu"), tiny=True)
    for check in CHECKS:
        findings = list(check(setting))
        assert findings
        assert all(finding.passed is not False for finding in findings), findings
