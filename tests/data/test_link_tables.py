"""Links from files: one set of nodes or two, relations, times, and splits that leak nothing."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet
from table_fuzzer import misread
from torch import Tensor

from mpnn.data import DamagedFile, LinkTables, link_tables
from mpnn.data.link_tables import read_pairs, unseen
from mpnn.train.link_predictor import auc

PARTS = ("train", "val", "test")


def write(path: Path, lines: list[str], header: str = "") -> Path:
    path.write_text("\n".join([*([header] if header else []), *lines]) + "\n")
    return path


def drawn(seed: int, *high: int, count: int = 600) -> list[tuple[int, ...]]:
    """Different rows of numbers below `high`, in random order."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.stack([torch.randint(n, (4 * count,), generator=generator) for n in high], 1).tolist()
    return list(dict.fromkeys(map(tuple, rows)))[:count]


def ratings(tmp_path: Path, users: int = 30, items: int = 40) -> Path:
    rows = drawn(0, users, items)
    lines = [f"{user},{item},{7 * k % 600}" for k, (user, item) in enumerate(rows)]
    return write(tmp_path / "ratings.csv", lines, "user_id,item_id,when")


def triples(tables: LinkTables, part: str) -> set[tuple[str, str, str]]:
    """The links of a part by name: source, relation, destination."""
    pairs: Tensor = getattr(tables.split, part)
    types = getattr(tables.split, f"{part}_type")
    relations = tables.relations or ("",)
    of = [0] * pairs.shape[1] if types is None else types.tolist()
    targets = tables.dst_ids or tables.ids
    return {(tables.ids[i], relations[r], targets[j]) for (i, j), r in zip(pairs.T.tolist(), of, strict=True)}


def said(tables: LinkTables) -> str:
    return "; ".join(f"{file}: {what}" for file, what in tables.understood)


def test_users_and_items_are_two_sets_whose_latest_links_are_the_test(tmp_path: Path) -> None:
    path = ratings(tmp_path)
    tables = link_tables(path, time="when")
    assert tables.form == "two sets"
    assert tables.ids == tuple(map(str, range(30)))
    assert tables.dst_ids == tuple(map(str, range(40)))
    rows = [line.split(",") for line in path.read_text().split()[1:]]
    latest = sorted(rows, key=lambda row: int(row[2]))
    assert [len(triples(tables, part)) for part in PARTS] == [510, 30, 60]
    assert triples(tables, "test") == {(user, "", item) for user, item, _ in latest[-60:]}
    assert triples(tables, "val") == {(user, "", item) for user, item, _ in latest[-90:-60]}
    assert tables.times is not None
    for part, times in zip(PARTS, tables.times, strict=True):
        when = {(user, item): float(time) for user, item, time in rows}
        ends = getattr(tables.split, part).T.tolist()
        assert times.tolist() == [when[tables.ids[i], tables.dst_ids[j]] for i, j in ends]
    graph = tables.split.graph
    assert (graph.num_src, graph.num_dst, graph.num_edges) == (30, 40, 510)
    assert "30 user_id, 40 item_id (two sets, as the columns are named" in said(tables)
    assert "510 train, 30 val, 60 test (by time, column when)" in said(tables)


def test_two_sets_of_one_size_keep_a_link_between_equal_numbers(tmp_path: Path) -> None:
    rows = [f"{k},{(k + step) % 12}" for k in range(12) for step in range(3)]
    tables = link_tables(write(tmp_path / "e.csv", rows, "user,item"))
    every = set.union(*(triples(tables, part) for part in PARTS))
    assert {(str(k), "", str(k)) for k in range(12)} <= every
    assert len(every) == 36
    assert "self-loops" not in said(tables)


@pytest.mark.parametrize(
    ("header", "sets"),
    [
        ("from,to", "one"),
        ("source_id,target_id", "one"),
        ("citing_paper,citedPaper", "one"),
        ("follower,followee", "one"),
        ("user1,user2", "one"),
        ("user,item", "two"),
        ("userId,movieId", "two"),
        ("from_user,to_item", "two"),
        ("user_id:token,item_id:token", "two"),
    ],
)
def test_the_names_of_columns_tell_one_set_of_numbers_from_two(tmp_path: Path, header: str, sets: str) -> None:
    path = write(tmp_path / "e.csv", [f"{i},{j}" for i, j in drawn(0, 20, 20, count=100)], header)
    tables = link_tables(path)
    assert ("one" if tables.dst_ids is None else "two") == sets
    for wanted in ("one", "two"):
        assert (link_tables(path, sets=wanted).dst_ids is None) == (wanted == "one")


def test_names_in_no_or_in_both_columns_tell_sets_of_text(tmp_path: Path) -> None:
    rows = drawn(0, 20, 20, count=100)
    apart = link_tables(write(tmp_path / "a.csv", [f"u{i},x{j}" for i, j in rows], "from,to"))
    assert apart.form == "two sets"
    assert "(two sets: no name is in both columns)" in said(apart)
    shared = link_tables(write(tmp_path / "b.csv", [f"p{i},p{j}" for i, j in rows], "user,item"))
    assert shared.form == "undirected"
    plain = link_tables(write(tmp_path / "c.csv", [f"{i},{j}" for i, j in rows]))
    assert plain.form == "undirected"
    wide = write(tmp_path / "d.csv", [f"{i},{j},5" for i, j in rows])
    with pytest.raises(DamagedFile, match=r"both have the number 0: say whether that is one node \(--sets one\)"):
        link_tables(wide, columns=[0, 1])
    assert link_tables(wide, columns=[0, 1], sets="two").form == "two sets"
    with pytest.raises(DamagedFile, match="sets must be 'one' or 'two'; got 'three'"):
        link_tables(wide, columns=[0, 1], sets="three")


def test_undirected_links_are_those_of_split_links(tmp_path: Path) -> None:
    rows = drawn(1, 25, 25, count=200)
    path = write(tmp_path / "e.csv", [f"{i},{j}" for i, j in rows], "from,to")
    tables = link_tables(path)
    links = {tuple(sorted((i, j))) for i, j in rows if i != j}
    found = [{tuple(sorted((int(i), int(j)))) for i, _, j in triples(tables, part)} for part in PARTS]
    assert set.union(*found) == links
    assert sum(map(len, found)) == len(links)
    edges = {tuple(edge) for edge in tables.split.graph.edge_index.T.tolist()}
    assert edges == {(j, i) for i, j in edges}, "messages pass in both directions"
    loops = sum(i == j for i, j in rows)
    assert f"{loops} self-loops left out, {len(rows) - loops - len(links)} repeats left out" in said(tables)
    one_way = link_tables(path, directed=True)
    assert one_way.form == "directed"
    assert {(int(i), int(j)) for part in PARTS for i, _, j in triples(one_way, part)} == {
        r for r in rows if r[0] != r[1]
    }


def facts(tmp_path: Path, count: int = 600) -> tuple[Path, set[tuple[str, str, str]]]:
    rows = drawn(2, 30, 5, 30, count=count)
    path = write(tmp_path / "facts.tsv", [f"e{i}\tr{r}\te{j}" for i, r, j in rows], "head\trelation\ttail")
    return path, {(f"e{i}", f"r{r}", f"e{j}") for i, r, j in rows if i != j}


def test_relations_stay_with_their_links(tmp_path: Path) -> None:
    path, every = facts(tmp_path)
    tables = link_tables(path, relation="relation")
    assert tables.form == "directed"
    assert tables.relations == ("r0", "r1", "r2", "r3", "r4")
    parts = [triples(tables, part) for part in PARTS]
    assert set.union(*parts) == every
    assert sum(map(len, parts)) == len(every)
    between = [{frozenset((i, j)) for i, _, j in part} for part in parts]
    assert not between[0] & between[1] | between[0] & between[2] | between[1] & between[2]
    headless = write(tmp_path / "plain.tsv", ["\t".join(t) for t in sorted(every)])
    same = link_tables(headless, relation="1")
    assert set.union(*(triples(same, part) for part in PARTS)) == every
    bought = [f"{i},{['views', 'buys'][k % 2]},{j}" for k, (i, j) in enumerate(drawn(3, 30, 30))]
    shop = link_tables(write(tmp_path / "shop.csv", bought, "user,what,item"), relation="what")
    assert (shop.form, shop.relations) == ("two sets", ("buys", "views"))
    assert {(i, r, j) for part in PARTS for i, r, j in triples(shop, part)} == {tuple(row.split(",")) for row in bought}


def test_absent_pairs_keep_source_and_relation_and_are_no_links(tmp_path: Path) -> None:
    for tables in (
        link_tables(facts(tmp_path)[0], relation="relation"),
        link_tables(ratings(tmp_path), columns=["user_id", "item_id"]),
    ):
        split = tables.split
        known = {
            (i, r, j)
            for part in PARTS
            for (i, j), r in zip(getattr(split, part).T.tolist(), types(split, part), strict=True)
        }
        training = {tuple(edge) for edge in split.train.T.tolist()}
        for part in ("val", "test"):
            held, absent = getattr(split, part), getattr(split, f"{part}_absent")
            assert torch.equal(held[0], absent[0])
            for (i, j), r in zip(absent.T.tolist(), types(split, part), strict=True):
                assert (i, r, j) not in known
                assert (i, j) not in training
                if tables.dst_ids is None:
                    assert i != j
                    assert (j, i) not in training


def types(split: object, part: str) -> list[int]:
    of = getattr(split, f"{part}_type")
    return [0] * getattr(split, part).shape[1] if of is None else of.tolist()


def test_nothing_but_the_links_tells_them_from_absent_pairs(tmp_path: Path) -> None:
    """Of links drawn at random; degrees, numbers, types and the links for training say nothing."""
    rows = drawn(4, 200, 200, count=6000)
    lines = [f"{i},{j},{k % 3},{k}" for k, (i, j) in enumerate(rows)]
    path = write(tmp_path / "e.csv", lines, "from,to,kind,when")
    kinds = {
        "undirected": link_tables(path, columns=["from", "to"]),
        "directed": link_tables(path, columns=["from", "to"], directed=True),
        "two sets": link_tables(path, columns=["from", "to"], sets="two"),
        "two sets in time": link_tables(path, columns=["from", "to"], sets="two", time="when"),
        "relations": link_tables(path, columns=["from", "to"], relation="kind"),
        "relations in time": link_tables(path, columns=["from", "to"], relation="kind", time="when"),
    }
    for kind, tables in kinds.items():
        split = tables.split
        out_degree = torch.bincount(split.train[0], minlength=200)
        in_degree = torch.bincount(split.train[1], minlength=200)
        linked = torch.zeros(200, 200)
        linked[split.train[0], split.train[1]] = 1
        leaks = {
            "numbers": lambda pair: pair[0].double() - pair[1],
            "position": lambda pair: torch.arange(pair.shape[1]).double(),
            "degree of the source": lambda pair, d=out_degree: d[pair[0]].double(),
            "degree of the destination": lambda pair, d=in_degree: d[pair[1]].double(),
            "a link for training": lambda pair, m=linked: m[pair[0], pair[1]],
            "its reverse": lambda pair, m=linked: m[pair[1], pair[0]],
        }
        for name, leak in leaks.items():
            error = (1 / (6 * split.test.shape[1])) ** 0.5  # of the AUC, if it is chance
            found = auc(leak(split.test), leak(split.test_absent))
            assert abs(found - 0.5) < 4 * error, f"{kind}: {name} scores {found:.3f}"


def test_dates_are_times(tmp_path: Path) -> None:
    rows = drawn(5, 20, 30, count=60)
    days = [f"2026-0{1 + k // 28}-{1 + k % 28:02} 08:30:00" for k in range(60)]
    path = write(tmp_path / "e.csv", [f"u{i},x{j},{day}" for (i, j), day in zip(rows, days, strict=True)], "a,b,day")
    tables = link_tables(path, time="day")
    assert tables.times is not None
    train, val, test = tables.times
    assert train.max() < val.min() <= val.max() < test.min()
    assert triples(tables, "test") == {(f"u{i}", "", f"x{j}") for i, j in rows[-6:]}
    path.write_text(path.read_text().replace(days[3], "soon"))
    with pytest.raises(
        DamagedFile, match=r"line \d+ of .*e.csv has .* in place of a number in column 'day'; a time is a"
    ):
        link_tables(path, time="day")
    path.write_text(path.read_text().replace("soon", ""))
    with pytest.raises(DamagedFile, match=r"line 5 of .*e.csv has no time in column 'day'"):
        link_tables(path, time="day")
    flags = write(tmp_path / "f.csv", [f"u{i},x{j},{k % 2 == 0}" for k, (i, j) in enumerate(rows)], "a,b,flag")
    with pytest.raises(DamagedFile, match=r"column 'flag' of .* holds true and false; a time is a number or a date"):
        link_tables(flags, time="flag")
    same = write(tmp_path / "g.csv", [f"u{i},x{j},{k > 50}" for k, (i, j) in enumerate(rows)], "a,b,t")
    same.write_text(same.read_text().replace("True", "2").replace("False", "1"))
    with pytest.raises(DamagedFile, match=r"cannot be split: .* column 't' has 2 different times"):
        link_tables(same, time="t")


def test_a_repeated_link_counts_at_its_first_time(tmp_path: Path) -> None:
    rows = [f"u{k},x{k % 5},{100 + k}" for k in range(40)] + ["u39,x4,1", "u0,x0,999"]
    tables = link_tables(write(tmp_path / "e.csv", rows, "a,b,t"), time="t")
    assert ("u39", "", "x4") in triples(tables, "train")
    assert ("u0", "", "x0") in triples(tables, "train")
    assert "40 links" in said(tables)
    assert "2 repeats left out" in said(tables)


def test_a_column_states_the_split(tmp_path: Path) -> None:
    rows = drawn(6, 30, 30, count=100)
    stated = [PARTS[k % 3] for k in range(100)]
    lines = [f"p{i},p{j},{part}" for (i, j), part in zip(rows, stated, strict=True) if i != j]
    tables = link_tables(write(tmp_path / "e.csv", lines, "from,to,split"), directed=True)
    for part in PARTS:
        of_part = {tuple(line.split(",")[:2]) for line in lines if line.endswith(part)}
        assert {(i, j) for i, _, j in triples(tables, part)} == of_part
    assert "(as stated)" in said(tables)
    again = write(tmp_path / "f.csv", [*lines, f"{lines[0].rsplit(',', 1)[0]},test"], "from,to,split")
    with pytest.raises(DamagedFile, match=r"line \d+ of .* repeats a link of another part of the split"):
        link_tables(again, directed=True)
    with pytest.raises(DamagedFile, match="has no part in column 'split': a link is of train, val, test"):
        link_tables(write(tmp_path / "g.csv", [*lines, "p0,p1,later"], "from,to,split"), directed=True)
    with pytest.raises(DamagedFile, match=r"training, validation and test have .* and 0 links"):
        link_tables(write(tmp_path / "h.csv", [x for x in lines if "test" not in x], "from,to,split"), directed=True)
    with pytest.raises(DamagedFile, match="states the split in column 'split', and column 'when' would decide it"):
        link_tables(write(tmp_path / "i.csv", [f"{x},1" for x in lines], "from,to,split,when"), time="when")


def test_relations_may_link_every_pair(tmp_path: Path) -> None:
    """No pair is without a link, and triples are; of one relation, no absent pair is left."""
    lines = [f"e{i}\tr{(i + j) % 3}\te{j}" for i in range(12) for j in range(12) if i != j]
    path = write(tmp_path / "e.tsv", lines, "head\trelation\ttail")
    tables = link_tables(path, relation="relation")
    split = tables.split
    every = set.union(*(triples(tables, part) for part in PARTS))
    assert len(every) == len(lines)
    assert split.test_type is not None
    for (i, j), r in zip(split.test_absent.T.tolist(), split.test_type.tolist(), strict=True):
        assert (tables.ids[i], tables.relations[r], tables.ids[j]) not in every
    with pytest.raises(DamagedFile, match=r"nearly every pair of .* is linked"):
        link_tables(path, columns=["head", "tail"], directed=True)


def test_nodes_have_features_and_some_no_link(tmp_path: Path) -> None:
    rows = drawn(7, 20, 20, count=80)
    edges = write(tmp_path / "e.csv", [f"p{i},p{j}" for i, j in rows], "from,to")
    nodes = write(tmp_path / "n.csv", [f"p{k},{k},{'ab'[k % 2]}" for k in range(25)], "id,age,kind")
    tables = link_tables(edges, nodes=nodes, categories="kind")
    assert tables.ids == tuple(f"p{k}" for k in range(25))
    assert tables.x is not None
    assert tables.x[3].tolist() == [3.0, 0.0, 1.0]
    assert tables.split.graph.num_src == 25
    with pytest.raises(DamagedFile, match=r"has a node in column '(from|to)' that is no id of the table of nodes: 'p"):
        link_tables(edges, nodes=write(tmp_path / "few.csv", ["p0,1", "p1,2"], "id,age"))
    with pytest.raises(DamagedFile, match=r"n.csv describes destinations of two sets; .* links nodes of one"):
        link_tables(edges, dst_nodes=nodes, ignore="kind")
    with pytest.raises(DamagedFile, match=r"features are those of nodes, which are missing"):
        link_tables(edges, categories=["kind"])


def test_two_sets_have_features_each(tmp_path: Path) -> None:
    rows = drawn(7, 20, 15, count=80)
    edges = write(tmp_path / "e.csv", [f"u{i},v{j}" for i, j in rows], "user,item")
    users = write(tmp_path / "u.csv", [f"u{k},{k},{'ab'[k % 2]}" for k in range(22)], "id,age,kind")
    items = write(tmp_path / "i.csv", [f"v{k},{2 * k}" for k in range(15)], "id,price")
    tables = link_tables(edges, nodes=users, dst_nodes=items, categories="kind")
    assert (tables.form, tables.inputs) == ("two sets", ("age", "kind", "price"))
    assert tables.x is not None
    assert tables.x.shape == (22 + 15, 4)
    assert tables.x[3].tolist() == [3.0, 0.0, 1.0, 0.0]
    assert tables.x[22 + 3].tolist() == [0.0, 0.0, 0.0, 6.0]
    alone = link_tables(edges, dst_nodes=items)
    assert alone.x is not None
    assert alone.x[-15:].tolist() == [[2.0 * k] for k in range(15)]
    assert not alone.x[:-15].any()
    with pytest.raises(DamagedFile, match="no column of features is named 'weight'"):
        link_tables(edges, nodes=users, dst_nodes=items, categories=["kind", "weight"])
    both = write(tmp_path / "b.csv", [f"{name}{k},{k}" for name in "uv" for k in range(20)], "id,age")
    assert link_tables(edges, nodes=both).form == "undirected", "a table of nodes of both sets makes them one"


def test_new_nodes_of_the_test_are_counted(tmp_path: Path) -> None:
    lines = [f"u{k // 4},x{k % 7},{k}" for k in range(80)]
    tables = link_tables(write(tmp_path / "e.csv", lines, "a,b,t"), time="t")
    assert unseen(tables.split, tables.form) == 1.0
    assert "100% of the test links have a node without a link in training" in said(tables)


def test_files_that_hold_no_links_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DamagedFile, match="must be a table with at least one row"):
        link_tables(write(tmp_path / "empty.csv", []))
    with pytest.raises(DamagedFile, match="has no link: write a row with two nodes for each"):
        link_tables(write(tmp_path / "header.csv", [], "from,to"))
    with pytest.raises(DamagedFile, match="has 3 different links; training, validation and test need 20 at least"):
        link_tables(write(tmp_path / "few.csv", ["a,b", "b,c", "c,d", "d,d", "a,b"], "from,to"))
    with pytest.raises(DamagedFile, match=r"line 3 of .* has a link without a node: column 'to' is empty"):
        link_tables(write(tmp_path / "gap.csv", ["a,b", "b,"] * 20, "from,to"))
    with pytest.raises(DamagedFile, match="has no column 'kind'; it has 'from', 'to'"):
        link_tables(write(tmp_path / "e.csv", ["a,b"] * 20, "from,to"), relation="kind")


def test_pairs_are_those_of_known_nodes(tmp_path: Path) -> None:
    path, every = facts(tmp_path)
    known = link_tables(path, relation="relation")
    head, relation, tail = sorted(every)[0]
    found = read_pairs(write(tmp_path / "p.tsv", [f"{tail}\t{relation}\t{head}"], "tail\trelation\thead"), known, path)
    assert found.names.tolist() == [[head, tail]]
    assert known.ids[int(found.pairs[0, 0])] == head
    assert found.types is not None
    assert known.relations[int(found.types[0])] == relation

    def refusal(line: str, header: str = "head,relation,tail") -> str:
        with pytest.raises(DamagedFile) as refused:
            read_pairs(write(tmp_path / "q.csv", [line], header), known, path)
        return str(refused.value)

    assert "line 2 of" in refusal("new,r0,e1")
    assert "has the node 'new' in column 'head', which no link of facts.tsv has" in refusal("new,r0,e1")
    assert "has the relation 'r9' in column 'relation', which no link of facts.tsv has" in refusal("e0,r9,e1")
    assert "leave the row out, or train again" in refusal("e0,r9,e1")
    assert "pairs a node with itself" in refusal("e1,r0,e1")
    assert "has no column 'relation'; pairs have the columns of facts.tsv, head, tail, relation" in refusal(
        "a,b", "head,tail"
    )
    assert "has a pair without a node" in refusal("e0,r0,")


def test_columns_that_options_name_are_a_header_also_above_a_node_of_that_name(tmp_path: Path) -> None:
    """A node called "to" makes a header of "from" and "to" doubtful, unless an option names a column."""
    names = ["to", *"abcdefghij"]
    rows = [f"{a},{b},{k}" for k, (a, b) in enumerate(combinations(names, 2)) if k % 5]
    (tmp_path / "links.csv").write_text("from,to,when\n" + "\n".join(rows))
    data = link_tables(tmp_path / "links.csv", time="when")
    assert (data.ends, set(data.ids)) == (("from", "to"), {*names})
    (tmp_path / "pairs.csv").write_text("from,to\nto,a\nb,to\n")
    pairs = read_pairs(tmp_path / "pairs.csv", data, tmp_path / "links.csv")
    assert [[data.ids[k] for k in pair] for pair in pairs.pairs.T.tolist()] == [["to", "a"], ["b", "to"]]


def test_users_and_items_in_parquet_are_two_sets_as_in_text(tmp_path: Path) -> None:
    pairs = torch.randperm(100, generator=torch.Generator().manual_seed(0))[:60]
    columns = {"user_id": (pairs // 10).tolist(), "item_id": (pairs % 10).tolist()}
    parquet.write_table(pyarrow.table(columns), tmp_path / "links.parquet")
    rows = [f"{a},{b}" for a, b in zip(*columns.values(), strict=True)]
    (tmp_path / "links.csv").write_text("user_id,item_id\n" + "\n".join(rows))
    forms = [link_tables(tmp_path / f"links.{suffix}").form for suffix in ("csv", "parquet")]
    assert forms == ["two sets", "two sets"]


def test_a_table_of_users_that_has_all_numbers_of_items_makes_no_items_of_them(tmp_path: Path) -> None:
    links = ratings(tmp_path, 30, 25)
    users = write(tmp_path / "users.csv", [f"{k},{k % 7}" for k in range(30)], "id,age")
    data = link_tables(links, time="when", nodes=users)
    assert (data.form, len(data.ids), len(data.dst_ids or ())) == ("two sets", 30, 25)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_sets", lambda right: lambda *given: (False, "")),
        ("_first_of_each", lambda right: lambda *given: right(*given)[:-1]),
        ("_times", lambda right: lambda *given: right(*given)[::-1]),
    ],
    ids=["one set", "a link is lost", "times in another order"],
)
def test_the_fuzzer_notices_links_that_are_misread(name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[read_pairs.__module__]
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    assert misread(range(3, 80, 4))
