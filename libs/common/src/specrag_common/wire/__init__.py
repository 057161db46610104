"""Messages of the contracts to domain objects and back.

Decoding is where outside data enters: everything is checked here, once, and a fault is an
``InvalidRequest`` that names the field, the value and the limit. Encoding trusts its input.
"""
