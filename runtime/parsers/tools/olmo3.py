"""Calls as Python writes them, each on a line of its own, between tags of OLMo 3's own."""

from meshlm.runtime.parsers import pythonic_calls
from meshlm.runtime.parsers.streamed_calls import Form, parser

PARSER = parser(Form(pythonic_calls.calls, opens=("<function_calls>",), closes=("</function_calls>",)))
