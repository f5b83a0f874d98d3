"""The polling code for the GPU, executed line by line on a memory in which packets arrive late and in any order."""

import random
import struct
from collections.abc import Callable

import pytest

from meshlm.kernels import packets

TURN, OLD, STRIDE, WORD = -(2**31), 2**31 - 2, 100, 8
Value = int | float


def bits(number: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def number(word: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", word & 0xFFFFFFFF))[0])


def execute(text: str, registers: dict[str, Value], load: Callable[[int], tuple[int, int]]) -> int:
    """PTX as packets.wait writes it; `load` of an address gives data and turn. How many loads there were."""
    lines = [line.rstrip(";") for line in text.splitlines()]
    labels = {line[:-1]: at for at, line in enumerate(lines) if line.endswith(":")}
    pairs: dict[str, tuple[int, int]] = {}
    at = loads = 0
    while at < len(lines):
        words = lines[at].replace(",", " ").split()
        at += 1
        if not words or words[0] in "{}" or words[0].startswith(".") or words[0].endswith(":"):
            continue
        if words[0].startswith("@"):
            wanted, name = not words[0].startswith("@!"), words.pop(0).lstrip("@!")
            if bool(registers[name]) != wanted:
                continue
        operation, *places = words

        def value(place: str) -> Value:
            if place.startswith("0f"):
                return float(struct.unpack(">f", bytes.fromhex(place[2:]))[0])
            return registers[place] if place in registers else int(place, 0)

        match operation.split("."):
            case ["bra"]:
                at = labels[places[0]]
            case ["ld", "relaxed", "sys", "global", "b64"]:
                loads += 1
                base, offset = places[1].strip("[]").split("+")
                pairs[places[0]] = load(int(registers[base]) + int(offset))
            case ["mov", "b64"]:
                registers[places[0].strip("{")], registers[places[1].strip("}")] = pairs[places[2]]
            case ["mov", "b32"] if places[0] == "part":
                registers["part"] = number(int(value(places[1])))
            case ["mov", *_]:
                registers[places[0]] = value(places[1])
            case ["add", *_]:
                registers[places[0]] = value(places[1]) + value(places[2])
            case ["shl", "b32"]:
                registers[places[0]] = (int(value(places[1])) << int(places[2])) & 0xFFFFFFFF
            case ["and", "b32"]:
                registers[places[0]] = int(value(places[1])) & int(places[2], 0)
            case ["setp", compare, *rest]:
                one, other = value(places[1]), value(places[2])
                found = one != other if compare == "ne" else one < other
                if rest[0] in ("or", "and"):
                    third = bool(registers[places[3]])
                    found = (found or third) if rest[0] == "or" else (found and third)
                registers[places[0]] = found
            case _:
                raise AssertionError(lines[at - 1])
    return loads


@pytest.mark.parametrize("spin_on", [None, 2])
@pytest.mark.parametrize(("size", "pairs"), [(4, True), (4, False), (8, True)])
def test_sums_once_all_have_come(size: int, pairs: bool, spin_on: int | None) -> None:
    wait = packets.wait(size, STRIDE, pairs, 4, spin_on)
    pack = wait.pack
    assert pack == packets.MOST_IN_FLIGHT // size
    assert wait.constraints.split(",") == ["=&f"] * (2 * pack) + ["l"] * pack + ["r"] * (2 * pack)
    for seed in range(20):
        chance = random.Random(seed)
        data = {
            nth * WORD + peer * STRIDE * WORD: (float(chance.randint(-9, 9)), float(chance.randint(-9, 9)))
            for nth in range(pack)
            for peer in range(size)
        }
        arrives = {place: chance.choice((0, 0, 5, 40, chance.randint(0, 300))) for place in data}
        time = 0

        def load(
            place: int, data: dict[int, tuple[float, float]] = data, arrives: dict[int, int] = arrives
        ) -> tuple[int, int]:
            nonlocal time
            time += 1
            if time <= arrives[place]:
                return bits(77.0), OLD  # of two turns ago
            even, odd = data[place]
            word = (bits(odd) & 0xFFFF0000) | ((bits(even) >> 16) & 0xFFFF) if pairs else bits(even)
            return word, TURN

        registers: dict[str, Value] = {}
        for nth in range(pack):
            registers[f"${2 * pack + nth}"] = nth * WORD
            registers[f"${3 * pack + nth}"] = TURN
            registers[f"${4 * pack + nth}"] = 10**6
        execute(wait.text, registers, load)
        for nth in range(pack):
            mine = [data[nth * WORD + peer * STRIDE * WORD] for peer in range(size)]
            assert registers[f"${nth}"] == sum(even for even, _ in mine)
            assert registers[f"${pack + nth}"] == (sum(odd for _, odd in mine) if pairs else 0)


@pytest.mark.parametrize("spin_on", [None, 1])
def test_patience_ends(spin_on: int | None) -> None:
    wait = packets.wait(2, STRIDE, True, 1, spin_on)
    registers: dict[str, Value] = {"$2": 0, "$3": TURN, "$4": 50}
    assert 50 <= execute(wait.text, registers, lambda place: (0, OLD)) <= 150
