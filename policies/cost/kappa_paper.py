"""What arXiv 2601.19910 prints, and the hidden constants that reproduce its printed digits.

Tables 1 and 2 follow from one link rate of 2^20/10^6 times 64 GB/s, FP8-dense peaks of one GPU and
kappa_M rounded to two decimals. What readers get wrong: the paper's text uses another set (64 GB/s,
2000 TFLOP/s), so a printed kappa_crit belongs to one of the two (papers.md 1.3 and 1.6).
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.cost.kappa import Kappa

TABLE_LINK_BYTES_PER_S = {"PCIe 4": 33.554432e9, "PCIe 5": 67.108864e9}
TABLE_FLOPS_PER_S = {"A100": 624e12, "H100": 1979e12, "B200": 4985e12}
SUSTAINED_BYTES_PER_S = 15e9  # measured there with vLLM and LMCache, over all eight GPUs
SUSTAINED_SHARE = 0.23  # of 64 GB/s, as printed


@dataclass(frozen=True, slots=True)
class PrintedModel:
    """A row of the paper's Table 1 with the parameters that its formula uses."""

    name: str  # of the model in conf/model
    n_active: float  # nominal
    kv_bytes_per_token: int
    kappa_model: float  # printed, FLOP/B (the table shows millions)

    def kappa(self, bytes_per_s: float, flops_per_s: float) -> Kappa:
        """The paper's formula with nominal parameters: ``2 N / B_kv * BW / C``."""
        return Kappa(2.0 * self.n_active, float(self.kv_bytes_per_token), bytes_per_s, flops_per_s)


TABLE_1 = {
    "llama3.1-70b": PrintedModel("llama3.1-70b", 70e9, 327_680, 0.42e6),
    "llama3.1-405b": PrintedModel("llama3.1-405b", 405e9, 516_096, 1.42e6),
    "qwen3-30b-a3b": PrintedModel("qwen3-30b-a3b", 3.3e9, 98_304, 0.07e6),
    "qwen3-235b-a22b": PrintedModel("qwen3-235b-a22b", 22e9, 192_512, 0.23e6),
    "deepseek-v3": PrintedModel("deepseek-v3", 37e9, 70_272, 1.06e6),
}

TABLE_2 = {  # B/FLOP (the table shows millionths), by GPU and link
    ("A100", "PCIe 4"): 53.8e-6,
    ("A100", "PCIe 5"): 107.5e-6,
    ("H100", "PCIe 4"): 17.0e-6,
    ("H100", "PCIe 5"): 34.0e-6,
    ("B200", "PCIe 4"): 6.7e-6,
    ("B200", "PCIe 5"): 13.5e-6,
}

TABLE_4 = {  # mean scheduled tokens an iteration, by workload and requests per second
    ("sharegpt", 70): 4064.0,
    ("sharegpt", 130): 3793.0,
    ("narrativeqa", 70): 532.0,
    ("narrativeqa", 130): 555.0,
}

TABLE_5 = {  # watts of an H100 of 700 W: mean and maximum
    ("sharegpt", 70): (196.0, 342.0),
    ("sharegpt", 130): (192.0, 287.0),
    ("narrativeqa", 70): (152.0, 202.0),
    ("narrativeqa", 130): (152.0, 194.0),
}

WORKLOADS = {  # tokens and ratios as printed; the queue of Table 4's ShareGPT has T mean 82
    "sharegpt": {
        "n_new_mean": 82.0,
        "n_new_p50": 20.0,
        "n_new_p90": 133.0,
        "n_history_mean": 11_115.0,
        "n_history_p50": 3200.0,
        "n_history_p90": 30_000.0,
        "kappa_ratio_p50": 100.0,
    },
    "narrativeqa": {"n_new_mean": 12.0, "n_history_p50": 57_000.0, "kappa_ratio_p50": 5000.0},
    "finqa": {"n_new_mean": 23.0, "n_history_p50": 167_000.0, "kappa_ratio_p50": 10_000.0},
}


def table_kappa_crit(model: str, gpu: str, link: str) -> float:
    """Product of the rounded entries of Tables 1 and 2, as the paper's text quotes it."""
    return TABLE_1[model].kappa_model * TABLE_2[gpu, link]
