"""The configuration a run folder keeps: read back, and refused in one line where it cannot be."""

from __future__ import annotations

import pytest

from dms_train.config.build import ConfigError
from dms_train.config.frozen import CONFIG_FILE, read_frozen


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file or directory.*give the folder of a run"),
        ("a: [1\nb: 2\n", "cannot be read.*restore it"),
        ("- 1\n- 2\n", "holds no configuration"),
    ],
)
def test_a_folder_without_a_readable_configuration_is_one_line(tmp_path, text, words) -> None:
    file = tmp_path / CONFIG_FILE
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=words) as refused:
        read_frozen(file)
    assert len(str(refused.value).splitlines()) == 1
    assert str(file) in str(refused.value)
