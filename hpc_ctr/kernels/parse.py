"""Tab-separated text to columns and back: loops over raw bytes, without a Python object a row.

A chunk of text is cut into cells once (``split_cells``); the column loops then read the cells they need. Row i, column
c is ``buf[cells[i, c] : cells[i, c + 1] - 1]``: the byte between two starts is the tab (or the line end).
Every loop reports a row that it cannot read in ``code`` (int8 [n], 0 = fine) and ``column`` (int16 [n]); the first
fault of a row stays.
"""

import math

import numpy as np
from numba import njit

from hpc_ctr.kernels.hashing import hash_span, mix64

OK, BAD_COLUMNS, BAD_LABEL, EMPTY_LABEL, BAD_NUMBER, BAD_HEX, RESERVED_ID, BAD_TIME = range(8)

# the two largest values are no ids: their keys mean "empty cell" and "unknown key"
MISSING_VALUE = np.uint64(0xFFFFFFFFFFFFFFFF)
DEFAULT_VALUE = np.uint64(0xFFFFFFFFFFFFFFFE)

_TAB, _LF, _CR = 9, 10, 13
_POW10 = np.array([float(f"1e{n}") for n in range(309)])     # up to 1e22 exact in float64
_DIGIT = np.full(256, 255, np.uint8)
_DIGIT[48:58] = np.arange(10)
_DIGIT[65:71] = _DIGIT[97:103] = np.arange(10, 16)
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8).copy()


@njit(nogil=True, cache=True)
def count_byte(buf, byte):
    """How often ``byte`` occurs in ``buf`` (uint8 array)."""
    n = 0
    for b in buf:
        n += b == byte
    return n


@njit(nogil=True, cache=True)
def split_cells(buf, n_lines, n_columns, code):
    """Cell starts, int32 [n_lines, n_columns + 1], of the lines in ``buf`` (uint8, under 2^31 bytes).

    A carriage return before the line end belongs to neither cell nor line; the last line may lack its line end. Rows
    with another number of columns get ``code`` BAD_COLUMNS; of those only the first and last start (the line) count.
    """
    cells = np.empty((n_lines, n_columns + 1), np.int32)
    size = len(buf)
    at = 0
    for row in range(n_lines):
        cells[row, 0] = at
        found = 0
        while at < size:
            byte = buf[at]
            at += 1
            if byte > _LF:                 # one comparison for nearly every byte
                continue
            if byte == _TAB:
                found += 1
                if found < n_columns:
                    cells[row, found] = at
            elif byte == _LF:
                break
        stop = at if at > cells[row, 0] and buf[at - 1] == _LF else at + 1
        if stop - 2 >= cells[row, 0] and buf[stop - 2] == _CR:
            stop -= 1
        cells[row, n_columns] = stop
        if found + 1 != n_columns:
            code[row] = BAD_COLUMNS
            cells[row, 1:n_columns] = stop
    return cells


@njit(nogil=True, cache=True)
def parse_number(buf, lo, hi):
    """(value float64, ok) of a decimal number: sign, digits, point, exponent; no spaces, no nan, no inf.

    Correctly rounded up to 2^53 as digits and powers of ten up to 22; beyond, within two units in the last place.
    """
    at = lo
    negative = False
    if at < hi and (buf[at] == 45 or buf[at] == 43):
        negative = buf[at] == 45
        at += 1
    mantissa, digits, shift = np.int64(0), 0, 0
    point = False
    while at < hi:
        byte = buf[at]
        if 48 <= byte <= 57:
            digits += 1
            if mantissa < 100_000_000_000_000_000:
                mantissa = mantissa * 10 + (np.int64(byte) - 48)
                shift -= point
            else:
                shift += not point
        elif byte == 46 and not point:
            point = True
        else:
            break
        at += 1
    if digits == 0:
        return 0.0, False
    if at < hi and (buf[at] == 101 or buf[at] == 69):
        at += 1
        down = False
        if at < hi and (buf[at] == 45 or buf[at] == 43):
            down = buf[at] == 45
            at += 1
        first, power = at, 0
        while at < hi and 48 <= buf[at] <= 57:
            power = min(power * 10 + (np.int64(buf[at]) - 48), 100_000)
            at += 1
        if at == first:
            return 0.0, False
        shift += -power if down else power
    if at != hi:
        return 0.0, False
    value = float(mantissa)
    if mantissa != 0 and shift > 0:
        if shift > 308:
            return 0.0, False
        value *= _POW10[shift]
    elif mantissa != 0 and shift < 0:
        value /= _POW10[min(-shift, 308)]
        if shift < -308:
            value = 0.0 if shift < -616 else value / _POW10[-shift - 308]
    if not math.isfinite(value):
        return 0.0, False
    return (-value if negative else value), True


@njit(nogil=True, cache=True)
def _parse_hex(buf, lo, hi):
    """(value uint64, ok) of 1 to 16 hex digits."""
    value = np.uint64(0)
    if hi - lo > 16:
        return value, False
    for at in range(lo, hi):
        digit = _DIGIT[buf[at]]
        if digit == 255:
            return value, False
        value = (value << np.uint64(4)) | np.uint64(digit)
    return value, True


@njit(nogil=True, cache=True)
def _log1p(value):
    return math.log1p(max(value, 0.0))


@njit(nogil=True, cache=True)
def criteo_columns(buf, cells, log1p, salts, label, dense, keys, code, column):
    """Reads label, D dense columns and F hex id columns of every row whose ``code`` is still 0.

    log1p: bool [D]. salts: uint64 [F]. Written: label float64 [n], dense float32 [n, D] (empty = 0), keys uint64 [n, F]
    (empty = the field's missing key), ``code`` and ``column``.
    """
    n_dense, n_fields = len(log1p), len(salts)
    for row in range(len(cells)):
        if code[row] != OK:
            continue
        lo, hi = cells[row, 0], cells[row, 1] - 1
        value, ok = parse_number(buf, lo, hi)
        if not ok:
            code[row], column[row] = (EMPTY_LABEL if lo == hi else BAD_LABEL), 0
            continue
        label[row] = value
        for d in range(n_dense):
            lo, hi = cells[row, 1 + d], cells[row, 2 + d] - 1
            if lo == hi:
                dense[row, d] = 0.0
                continue
            value, ok = parse_number(buf, lo, hi)
            if not ok:
                code[row], column[row] = BAD_NUMBER, 1 + d
                break
            dense[row, d] = _log1p(value) if log1p[d] else value
        if code[row] != OK:
            continue
        for f in range(n_fields):
            c = 1 + n_dense + f
            lo, hi = cells[row, c], cells[row, c + 1] - 1
            if lo == hi:
                keys[row, f] = mix64(MISSING_VALUE ^ salts[f])
                continue
            bits, ok = _parse_hex(buf, lo, hi)
            if not ok:
                code[row], column[row] = BAD_HEX, c
                break
            if bits >= DEFAULT_VALUE:
                code[row], column[row] = RESERVED_ID, c
                break
            keys[row, f] = mix64(bits ^ salts[f])


@njit(nogil=True, cache=True)
def number_column(buf, cells, c, fault, empty_fault, log1p, out, code, column):
    """Column ``c`` as float64 ``out`` [n]; empty = 0, or the fault ``empty_fault`` where that is not 0."""
    for row in range(len(cells)):
        if code[row] != OK:
            continue
        lo, hi = cells[row, c], cells[row, c + 1] - 1
        if lo == hi:
            out[row] = 0.0
            if empty_fault != OK:
                code[row], column[row] = empty_fault, c
            continue
        value, ok = parse_number(buf, lo, hi)
        if not ok:
            code[row], column[row] = fault, c
            continue
        out[row] = _log1p(value) if log1p else value


@njit(nogil=True, cache=True)
def text_column(buf, cells, c, salt, out):
    """Keys, uint64 ``out`` [n], of column ``c`` as text: hash of the bytes, salted; empty = the missing key."""
    missing = mix64(MISSING_VALUE ^ salt)
    for row in range(len(cells)):
        lo, hi = cells[row, c], cells[row, c + 1] - 1
        out[row] = missing if hi <= lo else mix64(hash_span(buf, lo, hi) ^ salt)


@njit(nogil=True, cache=True)
def _next_separator(buf, lo, hi, separator):
    width = len(separator)
    for at in range(lo, hi - width + 1):
        same = True
        for k in range(width):
            if buf[at + k] != separator[k]:
                same = False
                break
        if same:
            return at
    return hi


@njit(nogil=True, cache=True)
def text_bags(buf, cells, c, separator, salt, counts, keys):
    """Pieces of column ``c`` between separators (uint8 [w], w > 0); empty pieces do not count.

    With an empty ``keys`` only ``counts`` (int64 [n]) is filled, so that the caller can make room for their sum.
    """
    put = len(keys) > 0
    filled = 0
    width = len(separator)
    for row in range(len(cells)):
        lo, hi = cells[row, c], cells[row, c + 1] - 1
        found = 0
        while lo < hi:
            stop = _next_separator(buf, lo, hi, separator)
            if stop > lo:
                if put:
                    keys[filled] = mix64(hash_span(buf, lo, stop) ^ salt)
                    filled += 1
                found += 1
            lo = stop + width
        counts[row] = found


@njit(nogil=True, cache=True)
def line_hashes(buf, cells):
    """Hash, uint64 [n], of each line's bytes without its line end."""
    out = np.empty(len(cells), np.uint64)
    last = cells.shape[1] - 1
    for row in range(len(cells)):
        out[row] = hash_span(buf, cells[row, 0], cells[row, last] - 1)
    return out


@njit(nogil=True, cache=True)
def gather_single(keys, rows):
    """Field-major keys, uint64 [F * B], of ``rows`` (int64 [B]) of row-major keys [n, F]."""
    n_fields, size = keys.shape[1], len(rows)
    out = np.empty(n_fields * size, np.uint64)
    for b in range(size):
        row = rows[b]
        for f in range(n_fields):
            out[f * size + b] = keys[row, f]
    return out


@njit(nogil=True, cache=True)
def gather_bags(keys, offsets, rows, n_fields):
    """(keys, offsets int64 [F*B + 1]), field-major, of ``rows`` of row-major bags.

    Bag (row, f) lies at ``keys[offsets[row*F + f] : offsets[row*F + f + 1]]``.
    """
    size = len(rows)
    out_offsets = np.zeros(n_fields * size + 1, np.int64)
    for b in range(size):
        at = rows[b] * n_fields
        for f in range(n_fields):
            out_offsets[f * size + b + 1] = offsets[at + f + 1] - offsets[at + f]
    for i in range(n_fields * size):
        out_offsets[i + 1] += out_offsets[i]
    out = np.empty(out_offsets[n_fields * size], np.uint64)
    for b in range(size):
        at = rows[b] * n_fields
        for f in range(n_fields):
            to = out_offsets[f * size + b]
            for k in range(offsets[at + f], offsets[at + f + 1]):
                out[to] = keys[k]
                to += 1
    return out, out_offsets


@njit(nogil=True, cache=True)
def format_criteo(label, dense, ids, out):
    """Writes n rows as Criteo TSV into ``out`` (uint8, long enough) and returns the number of bytes.

    label: uint8 [n]. dense: int64 [n, D], ids: int64 [n, F], 32 bits used, as 8 hex digits; -1 = empty cell in both.
    """
    at = 0
    digits = np.empty(20, np.uint8)
    for row in range(len(label)):
        out[at] = 48 + label[row]
        at += 1
        for d in range(dense.shape[1]):
            out[at] = _TAB
            at += 1
            value = dense[row, d]
            if value < 0:
                continue
            n = 0
            while value > 0 or n == 0:
                digits[n] = 48 + value % 10
                value //= 10
                n += 1
            for k in range(n):
                out[at] = digits[n - 1 - k]
                at += 1
        for f in range(ids.shape[1]):
            out[at] = _TAB
            at += 1
            value = ids[row, f]
            if value < 0:
                continue
            for k in range(8):
                out[at + k] = _HEX[(value >> (28 - 4 * k)) & 15]
            at += 8
        out[at] = _LF
        at += 1
    return at
