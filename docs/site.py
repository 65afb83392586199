"""What makes a site of these pages, beside mkdocs.yml: pages of the root, notebooks, formulas."""

import base64
import html
import os
import re
from pathlib import Path

import nbformat
import ziamath
from mkdocs.structure.files import File
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
# NOTEBOOKS=false leaves them as they are kept, without what their cells show: some minutes less.
EXECUTE = os.environ.get("NOTEBOOKS", "true") != "false"
# Of formulas, in pixels: a little more than that of words.
SIZE = 17
# whole outlines: shared ones have ids, which a page would have many times
ziamath.config.svg2, ziamath.config.precision = False, 2
# Where formulas stand, as pymdownx.arithmatex marks them.
FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\s*\\([(\[])(.*?)\\[)\]]\s*</\1>', flags=re.DOTALL
)


def on_files(files, config):
    """The pages and notebooks that stand beside docs/, each written once."""
    for name in (*PAGES, "CITATION.cff"):
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        files.append(
            File(f"notebooks/{path.name}", str(ROOT), config.site_dir, config.use_directory_urls)
        )
        page, pictures = notebook_page(path)
        for name, content in {f"{path.stem}.md": page, **pictures}.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def notebook_page(path):
    """A notebook as Markdown, with what its cells show, and its pictures: name -> bytes."""
    notebook = nbformat.read(path, as_version=4)
    if EXECUTE:
        where = {"metadata": {"path": str(path.parent)}}
        NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=where).execute()
    lines, pictures = [], {}
    for cell in notebook.cells:
        lines.append(cell.source if cell.cell_type == "markdown" else fenced(cell.source, "python"))
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":  # that something is compiled, once
                continue
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                lines.append(f"![What this cell draws]({name})")
            elif text := output.get("text") or data.get("text/plain"):
                lines.append(fenced(text.rstrip(), "text"))
    lines.append(f"This page is [a notebook]({path.name}), to be run.")
    return "\n\n".join(lines), pictures


def fenced(text, language):
    return f"```{language}\n{text}\n```"


def on_page_markdown(markdown, page, config, files):
    """Links between the root and docs/ as they are on the site, where all stand in one folder."""
    if page.file.src_uri in PAGES:
        return markdown.replace("](docs/", "](")
    markdown = re.sub(r"\]\(\.\./notebooks/(\w+)\.ipynb", r"](notebooks/\1.md", markdown)
    return re.sub(r"\]\(\.\./(README|CHANGELOG|CONTRIBUTING|CITATION)\b", r"](\1", markdown)


def on_page_content(content, page, config, files):
    """Formulas as SVG: the same in every browser, without a script or a font of others."""
    return FORMULA.sub(drawn, content)


def drawn(found):
    text = " ".join(html.unescape(found[3]).split())
    inline = found[1] == "span"
    braced = re.sub(r"\\mathbb (\w)", r"\\mathbb{\1}", text)  # without, letters come out plain
    formula = ziamath.Latex(braced, size=SIZE, color="currentColor", inline=inline)
    label = html.escape(text, quote=True)
    style = f"vertical-align:{formula.getyofst():.1f}px"  # to stand on the line of the words
    svg = formula.svg().replace(
        "<svg ", f'<svg class="formula" role="img" aria-label="{label}" style="{style}" ', 1
    )
    return svg if inline else f'<div style="text-align:center;overflow-x:auto">{svg}</div>'
