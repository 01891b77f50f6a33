"The glossary: every link leads to a notebook, and every term stands in the one it leads to"
import json
import re
from pathlib import Path

import pytest

NBS = Path(__file__).parents[1] / "nbs"
ROW = re.compile(r"^\| \[\*\*(.+?)\*\*\]\((.+?)\)(?: \((.+?)\))? \| (.+?) \| (.+?) \|$")
WANTED = """paged attention, block table, slot mapping, continuous batching, prefill, decode, chunked prefill, preemption, prefix caching, KV cache,
CUDA graph, tensor parallelism, speculative decoding, roofline, occupancy, warp, tile, online softmax, split-KV, cascade attention,
programmatic dependent launch, mixture of experts, router, grouped GEMM, all-reduce, logits, temperature, top-k, top-p, min-p, log-sum-exp, rotary embedding"""


def sources(name, kinds=("markdown", "code")):
    cells = json.loads((NBS / name).read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] in kinds]


LINES = [line for source in sources("41_glossary.ipynb", ["markdown"]) for line in source.splitlines() if line.startswith("| ")]
ROWS = [match.groups() for line in LINES if (match := ROW.match(line))]


def test_every_line_is_a_term():
    others = [line for line in LINES if not ROW.match(line) and line not in ("| term | 中文 | is |", "| --- | --- | --- |")]
    assert not others
    names = [row[0].lower() for row in ROWS]
    assert len(names) == len(set(names))
    assert set(re.split(r",\s+", WANTED)) <= {row[0] for row in ROWS}


def test_each_has_a_chinese_term_and_one_sentence():
    for term, _, _, chinese, sentence in ROWS:
        assert chinese, term
        assert re.fullmatch(r"[^.].*[^.]\.", sentence) and not re.search(r"[.!?] [A-Z]", sentence), term
    # names that Chinese texts keep as they are come with a word that says what they are
    assert [row[0] for row in ROWS if not re.search(r"[\u4e00-\u9fff]", row[3])] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_term_stands_in_its_notebook(row):
    term, notebook, also, *_ = row
    assert (NBS / notebook).is_file()
    text = " ".join("\n".join(sources(notebook)).split())
    assert any(re.search(rf"(?<!\w){re.escape(word)}", text, re.I) for word in (term, also) if word)


def test_other_links_lead_somewhere():
    for source in sources("41_glossary.ipynb", ["markdown"]):
        for link in re.findall(r"\]\((\S+?)\)", source): assert (NBS / link).is_file(), link
