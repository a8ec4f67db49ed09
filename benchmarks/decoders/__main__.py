"""Make decoders with random weights by the exporters that people use, from sizes given by option.

python -m benchmarks.decoders llama|whisper FOLDER [--exporter optimum|genai] [--precision ...] [--size ...]

`README.md` beside this file says what to install and which files come out. Nothing is fetched: a model is
made from its configuration, and its weights are drawn from a seed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

os.environ["HF_HUB_OFFLINE"] = "1"

SEED: Final = 0
# Layers, hidden size, heads, heads of keys and values, inner size, vocabulary.
LLAMA: Final = {
    "small": (4, 256, 4, 2, 688, 1000),
    "135m": (30, 576, 9, 3, 1536, 49152),  # Sizes of SmolLM-135M
    "500m": (24, 896, 14, 2, 4864, 151936),  # Sizes of Qwen2.5-0.5B
}
# Layers of each of encoder and decoder, hidden size, heads, inner size, vocabulary.
WHISPER: Final = {
    "small": (2, 128, 2, 512, 1000),
    "tiny": (4, 384, 6, 1536, 51865),
    "base": (6, 512, 8, 2048, 51865),
}
PRECISIONS: Final = ("fp32", "fp16", "int4", "int4-fp16")
OPTIONS: Final = ("layers", "hidden", "heads", "kv_heads", "inner", "vocab")


def llama(sizes: dict[str, int], context: int) -> Any:
    """Return a decoder of Llama's architecture."""
    from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found, unused-ignore]

    config = LlamaConfig(
        num_hidden_layers=sizes["layers"],
        hidden_size=sizes["hidden"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        intermediate_size=sizes["inner"],
        vocab_size=sizes["vocab"],
        max_position_embeddings=context,
        initializer_range=sizes["hidden"] ** -0.5,  # Products then keep the scale of their inputs
    )
    return LlamaForCausalLM(config)


def whisper(sizes: dict[str, int]) -> Any:
    """Return an encoder and a decoder of Whisper's architecture."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration  # type: ignore[import-not-found, unused-ignore]

    last = sizes["vocab"] - 1
    config = WhisperConfig(
        encoder_layers=sizes["layers"],
        decoder_layers=sizes["layers"],
        d_model=sizes["hidden"],
        encoder_attention_heads=sizes["heads"],
        decoder_attention_heads=sizes["heads"],
        encoder_ffn_dim=sizes["inner"],
        decoder_ffn_dim=sizes["inner"],
        vocab_size=sizes["vocab"],
        init_std=sizes["hidden"] ** -0.5,
        pad_token_id=last,
        bos_token_id=last,
        eos_token_id=last,
        decoder_start_token_id=last - 1,
        begin_suppress_tokens=None,
    )
    return WhisperForConditionalGeneration(config)


def save(model: Any, folder: Path, vocab: int) -> None:
    """Save a model as the exporters read it, with a tokenizer that knows its tokens by number."""
    from tokenizers import Tokenizer, models  # type: ignore[import-not-found, unused-ignore]
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found, unused-ignore]

    model.eval().save_pretrained(folder)
    words = models.WordLevel({f"<{i}>": i for i in range(vocab)}, unk_token="<0>")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(folder)


def export_with_optimum(source: Path, output: Path, task: str, precision: str) -> None:
    """Export with Hugging Face Optimum; halves are converted by ONNX Runtime's script."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16
    from optimum.exporters.onnx import main_export  # type: ignore[import-not-found, unused-ignore]

    main_export(str(source), str(output), task=task, do_validation=False)
    if precision == "fp16":
        for file in output.glob("*.onnx"):
            half = convert_float_to_float16(onnx.load(file), keep_io_types=False)
            file.with_name(f"{file.name}_data").unlink(missing_ok=True)
            onnx.save(half, file, save_as_external_data=half.ByteSize() > 1 << 30)


def export_with_genai(source: Path, output: Path, precision: str, options: dict[str, str]) -> None:
    """Export with the builder of onnxruntime-genai."""
    from onnxruntime_genai.models.builder import create_model  # type: ignore[import-not-found, unused-ignore]

    build: Callable[..., None] = create_model
    weights, _, activations = precision.partition("-")
    provider = "webgpu" if "fp16" in (weights, activations) else "cpu"  # "cpu" writes only float32
    with tempfile.TemporaryDirectory() as cache:
        build("", str(source), str(output), weights, provider, cache, **options)


def main() -> None:
    """Make what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoders", description=__doc__)
    parser.add_argument("architecture", choices=("llama", "whisper"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--exporter", choices=("optimum", "genai"), default="optimum")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--size", choices=sorted({*LLAMA, *WHISPER}), default="small")
    for option in OPTIONS:
        parser.add_argument(f"--{option.replace('_', '-')}", type=int, help="in the place of the size's own")
    parser.add_argument("--context", type=int, default=2048, help="most tokens")
    parser.add_argument(
        "--genai-option", nargs="*", default=[], metavar="KEY=VALUE", help="given to genai's builder"
    )
    args = parser.parse_args()
    import torch  # type: ignore[import-not-found, unused-ignore]

    speaks = args.architecture == "llama"
    if args.precision.startswith("int4") and args.exporter == "optimum":
        parser.error("only genai's builder writes weights of 4 bits; add --exporter genai")
    if not speaks and args.exporter == "genai":
        parser.error("Whisper is exported with Optimum")
    table: dict[str, tuple[int, ...]] = {**(LLAMA if speaks else WHISPER)}
    if args.size not in table:
        parser.error(f"{args.architecture} has the sizes {', '.join(table)}")
    names = OPTIONS if speaks else tuple(name for name in OPTIONS if name != "kv_heads")
    sizes = dict(zip(names, table[args.size], strict=True))
    sizes |= {name: value for name in names if (value := getattr(args, name)) is not None}
    torch.manual_seed(SEED)
    options = dict(pair.split("=", 1) for pair in args.genai_option)
    with tempfile.TemporaryDirectory() as source:
        save(llama(sizes, args.context) if speaks else whisper(sizes), Path(source), sizes["vocab"])
        if args.exporter == "genai":
            export_with_genai(Path(source), args.folder, args.precision, options)
        else:
            task = "text-generation-with-past" if speaks else "automatic-speech-recognition-with-past"
            export_with_optimum(Path(source), args.folder, task, args.precision)
    print(*sorted(str(file) for file in args.folder.glob("*.onnx")), sep="\n")


if __name__ == "__main__":
    main()
