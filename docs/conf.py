"""Configuration of the site, which `make docs` builds."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent / "extensions"))
sys.path.insert(0, str(ROOT / "src"))
os.environ.setdefault("KERAS_BACKEND", "torch")

from sightline.view.palette import DARK, LIGHT, Theme  # after the path  # noqa: E402

project = "Sightline"
copyright = author = "The Sightline authors"

extensions = [
    "myst_nb",
    "sphinx_copybutton",
    "sphinx_design",
    "api_reference",  # this module and those below it are in the folder extensions/
    "literals",
    "mathml",
    "offline",
    "pictures",
    "source_pages",
]
nitpicky = True
exclude_patterns = ["_build", "extensions"]

# Pages are Markdown. Those with a header of jupytext are notebooks: the build executes them, and an error ends it.
source_suffix = {".md": "myst-nb"}
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
nb_code_prompt_show = "Show the drawing code"  # the course folds what draws its figures; answers have their own words
nb_code_prompt_hide = "Hide the drawing code"
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 120


def theme_colours(theme: Theme) -> dict[str, str]:
    """Return the theme's variables in the colours of the explorer page and the pictures."""
    colours = {
        "background-primary": theme.ground,
        "background-secondary": theme.hidden,
        "background-hover": theme.line,
        "background-border": theme.line,
        "foreground-primary": theme.ink,
        "foreground-secondary": theme.muted,
        "foreground-muted": theme.muted,
        "foreground-border": theme.cross,
        "brand-primary": theme.blue,
        "brand-content": theme.blue,
        "brand-visited": theme.blue,
        "code-background": theme.raised,
        "inline-code-background": theme.hidden,
        "table-border": theme.line,
        "card-background": theme.raised,
        "accent": theme.orange,
    }
    return {f"color-{name}": colour for name, colour in colours.items()} | {
        "font-stack": "Inter, system-ui, sans-serif"
    }


html_theme = "furo"
html_theme_options = {
    "light_css_variables": theme_colours(LIGHT),
    "dark_css_variables": theme_colours(DARK),
    "light_logo": "logo-light.svg",
    "dark_logo": "logo-dark.svg",
}
html_favicon = "static/logo-light.svg"
html_title = "Sightline"
html_math_renderer = "mathml"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["tables.js"]
html_copy_source = False
html_show_sphinx = False
smartquotes = False
highlight_language = "none"
toc_object_entries_show_parents = "hide"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# For the modules of extensions/: a folder of pictures or pages and the script of examples/ that draws them; the root of
# the repository; a page and the file of the root whose text it has.
drawn_pictures = {
    "eviction": "draw_eviction",
    "explorer": "draw_explorer",
    "gallery": "draw_gallery",
    "how-it-works": "draw_tiles",
    "performance": "draw_performance",
    "shared-prompts": "draw_shared_prompts",
}
root_of_sources = str(ROOT)
mirrored_pages = {"contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md"}
