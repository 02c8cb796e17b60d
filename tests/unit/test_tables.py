"""Tables against HTML and Markdown written by hand."""

from dms_train.tables import html_table, markdown_table


def test_markdown():
    text = markdown_table(["", "a|b"], [["x|y", 1], ["", 2.5]])
    assert text == "| | a&#124;b |\n|---|---|\n| x&#124;y | 1 |\n|  | 2.5 |"
    assert markdown_table(["a"], []) == "| a |\n|---|"
    shorter = markdown_table(["a", "b", "c"], [["x"], ["", "y"]])
    assert shorter.splitlines()[2:] == ["| x | | |", "|  | y | |"]


def test_html():
    assert html_table(["a<"], [["&", (1.5, "1.5 %")]], caption="C&D") == (
        "<table><caption>C&amp;D</caption><thead><tr><th>a&lt;</th></tr></thead>"
        "<tbody><tr><td>&amp;</td><td data-value='1.5'>1.5 %</td></tr></tbody></table>"
    )
    assert "caption" not in html_table(["a"], [])
