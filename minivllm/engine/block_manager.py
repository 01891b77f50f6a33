"Paged memory of the KV cache: who owns which block, and which blocks can be found again by their content"
from array import array
from collections import OrderedDict
from itertools import count

import xxhash

from minivllm.engine.sequence import Sequence

NO_PARENT = -1


def compute_hash(
    token_ids: list[int],  # of one full block
    prefix: int = NO_PARENT,  # hash of the block before it; NO_PARENT for the first
) -> int:  # 64 bits
    "Hash of a block's tokens *and* everything before them"
    h = xxhash.xxh64(prefix.to_bytes(8, "little", signed=prefix < 0))
    h.update(array("q", token_ids).tobytes())
    return h.intdigest()


class Block:
    "One physical block: how many tables hold it, and what it contains once it is full"
    __slots__ = ("block_id", "ref_count", "hash", "token_ids", "content_id", "parent_id")

    def __init__(self, block_id: int):
        self.block_id, self.ref_count = block_id, 0
        self.forget()

    def forget(self):
        "Nothing is known of the contents"
        self.hash, self.token_ids, self.content_id, self.parent_id = None, None, None, None

    def reset(self):
        "Given to a new owner: that one's table is the only one that holds it"
        self.forget()
        self.ref_count = 1

    def __repr__(self): return f"Block({self.block_id}, ref_count={self.ref_count}, cached={self.hash is not None})"


class BlockManager:
    "Allocates blocks to sequences, shares full ones between equal prefixes, and recycles the least recently used"
    def __init__(
        self,
        num_blocks: int,
        block_size: int,  # tokens of a block
        enable_prefix_caching: bool = True,
    ):
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        # least recently used first; an OrderedDict gives up any element in O(1), a deque would search for it
        self.free_block_ids = OrderedDict.fromkeys(range(num_blocks))
        self.hash_to_block_id = {}
        self._content_ids = count()

    @property
    def num_blocks(self) -> int: return len(self.blocks)

    @property
    def num_free_blocks(self) -> int: return len(self.free_block_ids)

    def blocks_for(self, num_tokens: int) -> int:
        "Blocks that `num_tokens` tokens fill"
        return -(-num_tokens // self.block_size)

    def lookup(
        self,
        seq: Sequence,  # about to be admitted
    ) -> list[int]:  # block ids, in order
        "Cached blocks that hold the beginning of `seq`, up to the first miss"
        hits, parent_id = [], NO_PARENT
        if not self.enable_prefix_caching: return hits
        # at least one token stays to be computed: without a query there are no logits to sample from
        for i in range((seq.num_tokens - 1) // self.block_size):
            block = self._find(self._hash(seq, i), seq.block(i), parent_id)
            if block is None: break
            hits.append(block.block_id)
            parent_id = block.content_id
        return hits

    def _hash(self, seq, i):
        "The hash of full block `i`; every hash of a sequence is computed once"
        hashes = seq.block_hashes
        while len(hashes) <= i:
            hashes.append(compute_hash(seq.block(len(hashes)), hashes[-1] if hashes else NO_PARENT))
        return hashes[i]

    def _find(self, block_hash, token_ids, parent_id):
        "The block with this hash, if it really holds these tokens behind that parent: hashes collide"
        block_id = self.hash_to_block_id.get(block_hash)
        if block_id is None: return None
        block = self.blocks[block_id]
        return block if block.token_ids == token_ids and block.parent_id == parent_id else None

    def can_allocate(
        self,
        seq: Sequence,
        hits: list[int],  # from `lookup`
    ) -> bool:
        "Whether the pool has blocks for all of `seq`'s tokens; hits that nobody holds come out of the pool too"
        free_hits = sum(self.blocks[block_id].ref_count == 0 for block_id in hits)
        return self.blocks_for(seq.num_tokens) - len(hits) + free_hits <= self.num_free_blocks

    def allocate_with_cache(
        self,
        seq: Sequence,  # with an empty block table
        hits: list[int],  # from `lookup`
    ):
        "Give `seq` blocks for all its tokens, the first of them shared"
        for block_id in hits:
            block = self.blocks[block_id]
            if block.ref_count == 0: del self.free_block_ids[block_id]
            block.ref_count += 1
        seq.block_table.extend(hits)
        seq.num_computed_tokens = len(hits) * self.block_size
        self.append(seq, seq.num_tokens)

    def can_append(
        self,
        seq: Sequence,
        num_tokens: int,  # tokens of `seq` whose K/V must have a slot
    ) -> bool:
        "Whether the pool has the blocks that `seq` lacks for its first `num_tokens` tokens"
        return self.blocks_for(num_tokens) - len(seq.block_table) <= len(self.free_block_ids)

    def append(self, seq: Sequence, num_tokens: int):
        "Extend the block table until it has a slot for each of the first `num_tokens` tokens"
        while len(seq.block_table) * self.block_size < num_tokens: seq.block_table.append(self._take())

    def _take(self):
        "The least recently used free block, its old content forgotten"
        block_id, _ = self.free_block_ids.popitem(last=False)
        block = self.blocks[block_id]
        # only its *own* entry: a twin with the same content may be the one that is indexed
        if block.hash is not None and self.hash_to_block_id.get(block.hash) == block_id: del self.hash_to_block_id[block.hash]
        block.reset()
        return block_id

    def cache_full_blocks(
        self,
        seq: Sequence,
        num_computed_before: int,  # tokens that were computed before this step
    ):
        "Index the blocks that this step has filled: all their K/V is computed now"
        if not self.enable_prefix_caching: return
        for i in range(num_computed_before // self.block_size, seq.num_computed_tokens // self.block_size):
            block, block_hash = self.blocks[seq.block_table[i]], self._hash(seq, i)
            token_ids = seq.block(i)
            parent_id = self.blocks[seq.block_table[i - 1]].content_id if i else NO_PARENT
            twin = self._find(block_hash, token_ids, parent_id)
            block.hash, block.token_ids, block.parent_id = block_hash, token_ids, parent_id
            # equal contents share an identity, so that what follows either of them is found behind both
            block.content_id = twin.content_id if twin else next(self._content_ids)
            self.hash_to_block_id.setdefault(block_hash, block.block_id)

    def deallocate(self, seq: Sequence):
        "Take all blocks back; what they contain stays findable until they are recycled"
        # the tail first: it will be recycled first, and a prefix without its root would be useless
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0: self.free_block_ids[block_id] = None
        seq.block_table = array("i")
        seq.num_computed_tokens = 0
