"""Sums that are too hard without the tool. Its data are ``task:calculator``."""

import ast
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlhf.rewards.functions import last_number

if TYPE_CHECKING:
    from rlhf.environments.chat import Chat

OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
MAX_DIGITS = 100


def calculate(expression: str) -> str:
    """Evaluates arithmetic with + - * / // % and brackets, such as 3 * (4 + 5)."""
    return str(_value(ast.parse(expression.strip(), mode="eval").body))


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](_value(operand))
        case _:
            raise ValueError(f"{ast.unparse(node)} is not arithmetic")
    if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
        raise ValueError(f"the result has more than {MAX_DIGITS} digits")
    return value


async def solve(chat: "Chat", answer: str) -> float:
    """1 if the last number of the model's answer is the result."""
    reply = await chat()
    return float(last_number(reply.text) == last_number(answer))
