"A tokenizer whose ids 0..255 are bytes, and model folders around it"
import json
import shutil
from pathlib import Path

from rigs import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

EOS, EOT, PAD, BOS = 256, 257, 258, 259
SPECIAL = ["<eos>", "<eot>", "<pad>", "<bos>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<bos>{{ message['role'] }}:{{ message['content'] }}<eot>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant:{% endif %}"
)


def bytes_to_letters() -> dict[int, str]:
    "The letter that ByteLevel writes for each byte: printable ones stand for themselves"
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return {byte: chr(byte if byte in printable else next(others)) for byte in range(256)}


def byte_backend() -> Tokenizer:
    "Byte-level BPE without merges"
    vocab = {letter: byte for byte, letter in bytes_to_letters().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def byte_tokenizer(
    add_bos: bool = False,  # in front of every text
    chat_template: str | None = None,
    **options,  # of PreTrainedTokenizerFast
) -> PreTrainedTokenizerFast:
    "The byte tokenizer as transformers knows it; its end token is <eos>"
    backend = byte_backend()
    if add_bos:
        backend.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **{"eos_token": "<eos>", **options})
    tokenizer.chat_template = chat_template
    return tokenizer


def byte_fallback_backend() -> Tokenizer:
    "As SentencePiece has it: pieces of words and, for what they can't spell, a token for each byte"
    vocab = {"<unk>": 0, "\u2581a": 1, "b": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def model_folder(
    folder: Path,  # to be made
    tokenizer=None,
    generation_config: dict | None = None,
    **config,  # keys of config.json to change; the end token is none unless given
) -> Path:
    "A tiny random Llama with a tokenizer of its own"
    source, _ = tiny_model("llama")
    shutil.copytree(source, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    path = folder / "config.json"
    # a key that is missing would mean the family's default: Llama's end token is 2
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": None, **config}))
    return folder
