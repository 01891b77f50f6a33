"What ranks do to the places in their memory, in every order that their waits allow"
from itertools import product

# A step as the exchanges that it makes: of rows by their owners, by pulling a place, by pushing what stands in one, by other means
STEPS = {
    "long": ["owners"] * 3, "middle": ["other", "pull 0", "pull 1"], "short": ["other", "push 0", "push 1"], "few rows": ["other"] * 2,
    "experts, middle": ["other", "pull 0", "other"], "experts, short": ["other", "push 0", "other"],
    "experts in the second layer": ["other", "pull 0", "pull 1", "pull 0", "other"],
}


def actions_of(rank, exchanges, num_ranks, no_second_wait):
    "What a rank does, in order: (write | read, whose memory, place, exchange, of which rank), (say | wait,)"
    ranks, meet, actions = range(num_ranks), [("say",), ("wait",)], []
    for i, exchange in enumerate(exchanges):
        kind, place = exchange.split()[0], int(exchange[-1]) if exchange[-1].isdigit() else None
        if kind == "owners":
            actions += [("write", r, 0, i, rank) for r in ranks] + meet + [("read", rank, 0, i, r) for r in ranks]
            actions += [("write", r, 1, i, rank) for r in ranks] + meet * (not no_second_wait)
            actions += [("read", rank, 1, i, r) for r in ranks]  # by who wants the norms; behind the last sum the LM head
        else:
            actions += [] if place is None else [("write", rank, place, i, rank)]
            actions += [("read", rank, place, i, rank)] * (kind == "push") + meet
            actions += [("read", r, place, i, r) for r in ranks] * (kind == "pull")
    return actions


def find_hazard(exchanges, num_ranks, no_second_wait=False):
    "What goes wrong in some order: a rank finds something else than it reads, or all wait; None: nothing"
    programs = [actions_of(rank, exchanges, num_ranks, no_second_wait) for rank in range(num_ranks)]
    said = [[sum(a == ("say",) for a in program[:k]) for k in range(len(program) + 1)] for program in programs]
    todo, seen = [((0,) * num_ranks, ((),) * 2 * num_ranks)], set()
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        at, memory = state
        moved = False
        for rank in range(num_ranks):
            if at[rank] == len(programs[rank]):
                continue
            what, *where = programs[rank][at[rank]]
            after = list(memory)
            if what == "wait" and any(said[r][at[r]] < said[rank][at[rank]] for r in range(num_ranks)):
                continue
            if what in ("read", "write"):
                owner, place, i, source = where
                found = memory[2 * owner + place]
                if what == "read" and (source, i) not in found:
                    return f"rank {rank} reads place {place} of rank {owner} for exchange {i} and finds {found}"
                if what == "write":  # a new exchange takes the whole place
                    kept = [entry for entry in found if entry[1] == i and entry[0] != source]
                    after[2 * owner + place] = tuple(sorted([*kept, (source, i)]))
            moved = True
            todo.append(((*at[:rank], at[rank] + 1, *at[rank + 1 :]), tuple(after)))
        if not moved and any(k < len(program) for k, program in zip(at, programs)):
            return "all wait"
    return None


def sequences(length):
    "Every sequence of so many steps, as one list of exchanges, with its name"
    for names in product(STEPS, repeat=length):
        yield ", ".join(names), [exchange for name in names for exchange in STEPS[name]]
