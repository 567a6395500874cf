"""The notebooks of docs/course: they open, their cells compile, their links exist, and all cells run (soak)."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

import course_notebooks
from course_notebooks import FOLDER, cells, compile_cells, notebooks

PAGES = [FOLDER / "index.md", *notebooks()]
SECONDS = 300  # the limit of one notebook on a slow machine
each_notebook = pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)


def run(path):
    """Run a notebook in a process of its own, so that matplotlib's defaults and NumPy's threads do not leave it."""
    command = [sys.executable, "-W", "error", course_notebooks.__file__, str(path)]
    settings = {**os.environ, "MPLBACKEND": "Agg"}
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=settings, check=False)


def test_the_course_has_five_notebooks():
    assert [path.name[:3] for path in notebooks()] == ["01-", "02-", "03-", "04-", "05-"]


@each_notebook
def test_every_cell_compiles(path):
    assert len(compile_cells(path)) > 10


@each_notebook
def test_a_notebook_tells_what_it_teaches_and_ends_with_three_exercises(path):
    text = path.read_text(encoding="utf-8")
    goals, exercises = text.index("After this notebook you can"), text.index("\n## Exercises\n")
    assert goals < text.index("\n## ") < exercises < text.index("\n## Sources\n")
    assert re.findall(r"^\*\*(\d)\.\*\*", text[exercises:], re.MULTILINE) == ["1", "2", "3"]
    answers = [code for options, code in cells(path) if "Show the answer" in options]
    assert len(answers) == 3
    assert all("assert" in code for code in answers)


@each_notebook
def test_every_figure_has_a_description_and_folded_code(path):
    drawn = [(options, code) for options, code in cells(path) if "style.show(" in code]
    assert len(drawn) >= 2
    for options, code in drawn:
        assert "hide-input" in options
        assert re.search(r'style\.show\(\s*figure,\s*"', code)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_links_exist(path):
    prose = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose)
    assert links
    assert [link for link in links if not (FOLDER / link).exists()] == []


def test_the_index_lists_every_notebook_twice():
    """Once in the table, and once in the hidden table of contents of the site."""
    text = (FOLDER / "index.md").read_text(encoding="utf-8")
    for path in notebooks():
        assert text.count(f"({path.name})") == 1
        assert text.count(f"\n{path.stem}\n") == 1


@each_notebook
def test_jupytext_reads_the_same_cells(path):
    jupytext, nbformat = pytest.importorskip("jupytext"), pytest.importorskip("nbformat")
    notebook = jupytext.read(path)
    nbformat.validate(notebook)
    read = [cell.source.strip() for cell in notebook.cells if cell.cell_type == "code"]
    assert read == [code.strip() for _, code in cells(path)]


@pytest.fixture
def style():
    spec = importlib.util.spec_from_file_location("course_style", FOLDER / "style.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_numbers_of_a_matrix_have_the_signs_of_formulas(style):
    figure, axis = style.new_figure(height=1)
    style.draw_matrix(axis, [[-1.26, -0.04], [float("-inf"), float("nan")]], "S", numbers="{:.1f}", signed=True)
    assert [text.get_text() for text in axis.texts] == ["−1.3", "0.0", "−∞", "NaN"]
    assert figure.get_size_inches()[0] == style.WIDTH


def test_several_matrices_can_share_their_colours(style):
    _, axis = style.new_figure(height=1)
    alone, shared = (style.draw_matrix(axis, [[0.2, 0.1]], "P", **look) for look in ({}, {"largest": 1}))
    assert (alone.get_clim(), shared.get_clim()) == ((0, 0.2), (0, 1))


def test_a_picture_is_shown_with_its_description(style):
    figure, axis = style.new_figure(height=1)
    axis.plot([1, 2])
    picture = style.show(figure, 'a line, "rising" & straight')
    assert {picture.light[:4], picture.dark[:4]} == {b"\x89PNG"}
    assert 'alt="a line, &quot;rising&quot; &amp; straight"' in picture._repr_html_()
    assert "data:image/png;base64,iVBOR" in picture._repr_html_()


def write_notebook(path, *codes):
    path.write_text("".join(f"```{{code-cell}} ipython3\n:tags: [hide-input]\n\n{code}\n```\n\n" for code in codes))
    return path


def test_a_cell_that_fails_is_found(tmp_path):
    good = run(write_notebook(tmp_path / "good.md", "x = 1", "assert x == 1"))
    bad = run(write_notebook(tmp_path / "bad.md", "x = 1", "assert x == 2"))
    assert (good.returncode, bad.returncode) == (0, 1)
    assert "bad.md, cell 2" in bad.stderr


def test_a_cell_that_is_no_python_is_found(tmp_path):
    with pytest.raises(SyntaxError):
        compile_cells(write_notebook(tmp_path / "bad.md", "x = "))


@pytest.mark.soak
@each_notebook
def test_all_cells_run(path):
    result = run(path)
    assert result.returncode == 0, result.stdout + result.stderr
