"Notebook processors for the documentation site, named in settings.ini's `procs`"
import re


def quarto_mermaid(cell):
    "JupyterLab draws a ```mermaid block, Quarto a ```{mermaid} one"
    if cell.cell_type == "markdown":
        cell.source = re.sub(r"^```mermaid\s*$", "```{mermaid}", cell.source, flags=re.M)
