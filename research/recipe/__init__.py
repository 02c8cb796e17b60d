"""Recipes of real models: from the download to the report and the model cards."""

from benchmarks.records import Table

_SECONDS = "docs/models/seconds.md"
_MEASURED = ("dms_train/method", "dms_train/training", "dms_train/inference/policies")
_TIMED = (
    *("dms_train/method", "dms_train/training", "dms_train/inference", "dms_train/kernels"),
    "research/wall_clock.py",
)
_PAGES = {
    "docs/models/smollm2.md": (
        "nvidia_h200/smollm2_135m.json",
        "*/smollm2_135m_defaults.json",
        "*/smollm2_135m_needles.json",
        "*/smollm2_135m_policies*.json",
    ),
    "docs/models/qwen25_coder.md": (
        "*/qwen25_coder_0_5b.json",
        "*/qwen25_coder_0_5b_defaults.json",
        "*/qwen25_coder_0_5b_policies*.json",
        "*/qwen25_coder_0_5b_perplexity.json",
        "*/qwen25_coder_0_5b_prompts*.json",
        "*/qwen25_coder_0_5b_textbooks.json",
    ),
    _SECONDS: ("*/*_seconds.json",),
    "docs/models/settings.md": ("*/smollm2_sweep*.json",),
    "docs/models/policies.md": ("*/*_policy_choices.json",),
    "docs/models/earlier_runs.md": (
        "nvidia_h100*/smollm2_135m.json",
        "*/smollm2_135m_first.json",
        "*/smollm2_135m_second.json",
        "*/smollm2_135m_window_16.json",
        "*/qwen25_coder_0_5b_instructions.json",
        "*/qwen25_coder_0_5b_questions.json",
        "*/qwen25_coder_0_5b_window_16.json",
    ),
}
_WITH_SECONDS = "*/qwen25_coder_0_5b_defaults.json"  # the page of seconds has a part of it
TABLES = tuple(
    Table(pattern, page, _TIMED if page == _SECONDS or pattern == _WITH_SECONDS else _MEASURED)
    for page, patterns in _PAGES.items()
    for pattern in patterns
)
