"""Canonical windows: on a CPU in bfloat16 products have fixed shapes, so a token's bits depend on its context alone.

Linear layers multiply windows of some rows at a time; rows of zeros fill the last one. In a product of one shape a
row's result depends neither on the other rows nor on its place. Windows of other sizes are used if a check at the start
finds the same bits. Attention takes at most PIECE rows of a request at once: vLLM's kernel chooses its tiles of KV by
the number of rows, and adds tile by tile. All else is computed row by row. Rows of prompts, drafts and answers are
alike, so each pass is canonical, and so is its KV. Called by worker.py.
"""

from collections.abc import Callable
from functools import lru_cache, partial

import torch

WINDOW = 16
"""Rows of the window whose bits count."""

SIZES = 2, 4, 8, 16, 32, 64, 128, 256
"""Rows of windows that are used if their bits are those of WINDOW rows; they rise."""

PIECE = 8
"""Maximum number of heads' rows of one request in a call of vLLM's attention: its smallest tile (vLLM 0.32, CPU)."""

COMPARED = 2**20
"""Least number of results that a size is compared by. Sums in another order change few of them once they are rounded to
bfloat16: one in 10,000 to 150,000 was seen with AMX, where a size has a kernel of its own.
"""

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""vLLM's `cpu_linear` of a layer: takes rows [n, in], the weight and a bias; returns [n, out]."""


class WindowedProduct:
    """A layer's product in windows of these sizes."""

    def __init__(self, product: Product, sizes: tuple[int, ...]):
        self._product, self._sizes = product, sizes

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        count, windows = len(rows), divided(len(rows), self._sizes)
        if missing := sum(windows) - count:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, missing))
        parts = [self._product(part, weight, bias) for part in rows.split(windows)]
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
        return found[:count].view(*x.shape[:-1], found.shape[-1])


@lru_cache(4_096)
def divided(rows: int, sizes: tuple[int, ...]) -> list[int]:
    """Returns the sizes of the windows for some rows: few windows, and at most a quarter of one empty, if possible."""
    found = []
    while rows > 0 or not found:
        size = next((size for size in sizes if size >= rows), sizes[-1])
        if 4 * rows < 3 * size:
            size = max((size for size in sizes if size <= rows), default=sizes[0])
        found.append(size)
        rows -= size
    return found


class Windows:
    """The windows of a model. Each shape of a weight is checked once."""

    def __init__(self):
        self._sizes: dict[tuple[int, int, bool], tuple[int, ...]] = {}

    def wrap(self, model: torch.nn.Module) -> None:
        """Wraps the products of vLLM's layers. Call it after each load of weights, which makes new products.

        Raises ValueError, one line, if a product depends on the place of a row.
        """
        for module in model.modules():
            product = vars(module).get("cpu_linear")
            if product is not None and not isinstance(product, WindowedProduct):
                module.cpu_linear = WindowedProduct(product, self._sizes_of(module))

    def _sizes_of(self, module: torch.nn.Module) -> tuple[int, ...]:
        inputs = module.weight.shape[1] if module.weight.numel() else module.input_size
        bias = getattr(module, "bias", None)
        product = partial(module.cpu_linear, weight=module.weight, bias=bias)
        outputs = product(torch.zeros(WINDOW, inputs, dtype=module.weight.dtype)).shape[1]
        shape = inputs, outputs, bias is None
        if shape not in self._sizes:
            count, chance = max(map(partial(rows_compared, outputs), SIZES)), torch.Generator().manual_seed(0)
            rows = torch.randn(count + WINDOW, inputs, generator=chance).to(module.weight.dtype)
            self._sizes[shape] = equal_sizes(product, rows, outputs)
        return self._sizes[shape]


def rows_compared(outputs: int, size: int) -> int:
    """Returns the rows of as many windows of a size as make COMPARED results of a product with some outputs."""
    return size * -(-COMPARED // (size * outputs))


def equal_sizes(product: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, outputs: int) -> tuple[int, ...]:
    """Returns those of SIZES whose windows give rows the bits that they have in windows of WINDOW rows.

    `rows`: WINDOW more than the most that `rows_compared` returns. Raises ValueError, one line, if bits depend on a
    row's place.
    """

    def products(size: int, first: int = 0) -> torch.Tensor:
        return torch.cat([product(part) for part in rows[first : first + rows_compared(outputs, size)].split(size)])

    wanted = torch.cat([product(window) for window in rows[: len(rows) // WINDOW * WINDOW].split(WINDOW)])
    if not torch.equal(moved := products(WINDOW, first=1), wanted[1 : len(moved) + 1]):
        mend = "write exactness: law, or dtype: float32"
        raise ValueError(f"exactness bits: on this processor a product of bfloat16 depends on a row's place; {mend}")
    return tuple(size for size in SIZES if size == WINDOW or torch.equal(found := products(size), wanted[: len(found)]))


def attend_in_pieces(builder) -> None:
    """Makes a builder of attention metadata, vLLM's CPUAttentionMetadataBuilder, divide requests of many rows."""
    shared, build = builder.num_heads // builder.num_kv_heads, builder.build
    tokens = PIECE // shared if PIECE % shared == 0 else PIECE  # vLLM groups the heads of one KV head only if they fit

    def build_in_pieces(common_prefix_len, common_attn_metadata, fast_build=False):
        return build(common_prefix_len, pieces(common_attn_metadata, tokens), fast_build)

    builder.build = build_in_pieces


def pieces(metadata, tokens: int):
    """Returns vLLM's CommonAttentionMetadata with a request for every `tokens` tokens of a request."""
    if metadata.max_query_len <= tokens:
        return metadata
    starts = metadata.query_start_loc.long()
    counts = (starts.diff() + tokens - 1) // tokens
    owner = torch.arange(len(counts)).repeat_interleave(counts)
    place = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
    first, last = starts[owner] + place * tokens, starts[owner + 1]
    after = last - torch.minimum(first + tokens, last)  # tokens of the request after the piece
    begins = torch.cat([first, starts[-1:]]).int()
    return metadata.replace(
        num_reqs=len(owner),
        max_query_len=tokens,
        query_start_loc=begins,
        query_start_loc_cpu=begins,
        seq_lens=metadata.seq_lens[owner] - after.int(),
        block_table_tensor=metadata.block_table_tensor[owner],
    )


def check_fits(config) -> None:
    """Raises ValueError, one line, if a model has parts that compute otherwise. `config`: vLLM's VllmConfig."""
    model = config.model_config
    unlike = {
        "mixtures of experts": model.is_moe,
        "linear attention": model.is_hybrid or model.is_attention_free,
        "latent attention (MLA)": model.use_mla,
        "quantized weights": model.is_quantized or model.quantization is not None,
        "images, videos or sounds": model.is_multimodal_model,
        "adapters": config.lora_config is not None,
        "several ranks": config.parallel_config.world_size > 1,
    }
    for found in (name for name, has in unlike.items() if has):
        mend = "write exactness: law, or dtype: float32"
        raise ValueError(f"exactness bits in bfloat16 on a CPU: not with {found}; {mend}")
