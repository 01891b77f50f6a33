"Requests in pages, for the tests of attention: batches of a step, and a float64 reference"
import torch

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
KERNEL_DEVICES = DEVICES[-1:]  # where kernels run: compiled on a GPU, interpreted where there is none


def slot_of(table, position, block_size):
    "Slots of the positions of a request"
    table, position = torch.as_tensor(table), torch.as_tensor(position)
    return table[position // block_size].long() * block_size + position % block_size


def paged_batch(query_lens, context_lens, block_size, heads, shared=0, unused=torch.nan, device="cpu", dtype=torch.float32):
    """Arguments of `paged_prefill` up to the scale, and each request's plain K and V

    Pages lie in random order; every slot that no request owns holds `unused`. All requests begin with the same `shared` blocks.
    """
    num_heads, num_kv_heads, head_dim = heads
    counts = [-(-n // block_size) for n in context_lens]
    free = torch.randperm(shared + sum(counts) + 2).tolist()
    caches = torch.full((2, len(free), block_size, num_kv_heads, head_dim), unused)
    prefix, common = [free.pop() for _ in range(shared)], torch.randn(2, shared * block_size, num_kv_heads, head_dim)
    tables, plain = torch.zeros(len(counts), max([*counts, 1]), dtype=torch.int32), []
    for row, (n, count) in enumerate(zip(context_lens, counts)):
        table = torch.tensor((prefix + [free.pop() for _ in range(count)])[:count], dtype=torch.int32)
        tables[row, :count] = table
        kv = torch.cat((common, torch.randn(2, n, num_kv_heads, head_dim)), 1)[:, :n]
        caches.flatten(1, 2)[:, slot_of(table, torch.arange(n), block_size)] = kv
        plain.append(kv.to(device, dtype))
    cu_seqlens_q = torch.tensor([0, *query_lens]).cumsum(0).int()
    q = torch.randn(sum(query_lens), num_heads, head_dim)
    floats = [t.to(device, dtype) for t in (q, *caches)]
    return (*floats, *(t.to(device) for t in (tables, cu_seqlens_q, torch.tensor(context_lens, dtype=torch.int32)))), plain


def reference(q, query_lens, plain, scale):
    "Causal attention of each request's last queries, from plain K and V, in float64"
    out = []
    for part, (k, v) in zip(q.double().split(query_lens), plain):
        group, context_len = q.shape[1] // k.shape[1], len(k)
        for i, query in enumerate(part):
            seen = context_len - len(part) + i + 1
            keys, values = (t[:seen].double().repeat_interleave(group, 1) for t in (k, v))
            probs = torch.einsum("hd,shd->hs", query, keys).mul(scale).softmax(-1)
            out.append(torch.einsum("hs,shd->hd", probs, values))
    return torch.stack(out)


class Pages:
    "Block tables of running requests, without an engine"

    def __init__(self, block_size, num_blocks=256):
        self.block_size, self.free = block_size, torch.randperm(num_blocks).tolist()
        self.tables, self.computed = {}, {}

    def start(self, request, cached=0, of=None):
        "A request whose first `cached` tokens (whole blocks) are found in the blocks of another"
        self.tables[request] = self.tables[of][: cached // self.block_size] if cached else []
        self.computed[request] = cached

    def step(self, num_tokens, kv_caches, make_context):
        "Context, positions, and request -> positions in the order of the rows: decodes first"
        order = sorted(num_tokens, key=lambda r: num_tokens[r] > 1)
        spans = {r: range(self.computed[r], self.computed[r] + num_tokens[r]) for r in order}
        for r, span in spans.items():
            while len(self.tables[r]) * self.block_size < span.stop:
                self.tables[r].append(self.free.pop())
            self.computed[r] = span.stop
        tables = torch.zeros(len(order), max(len(self.tables[r]) for r in order), dtype=torch.int32)
        for row, r in zip(tables, order):
            row[: len(self.tables[r])] = torch.tensor(self.tables[r])
        ctx = make_context(
            torch.cat([slot_of(self.tables[r], torch.arange(span.start, span.stop), self.block_size) for r, span in spans.items()]),
            tables,
            torch.tensor([span.stop for span in spans.values()], dtype=torch.int32),
            torch.tensor([0, *(len(span) for span in spans.values())]).cumsum(0).int(),
            sum(n == 1 for n in num_tokens.values()),
            max([n for n in num_tokens.values() if n > 1], default=0),
            kv_caches,
        )
        return ctx, torch.tensor([p for span in spans.values() for p in span]), spans
