"""Tells the user of data that travels in a costly form."""

from __future__ import annotations

import warnings

from loaderpool.errors import LargeDataWarning
from loaderpool.trainer.session.warnings import level_outside
from loaderpool.transport.payload.ship import Shipment


def warn_of_data(shipment: Shipment) -> None:
    """Warn, in the line of the user's that has led here, of long lists that are not packed, and of those of ints.

    Raises:
        LargeDataWarning: where a filter makes an error of it.
    """
    texts = [str(each) for each in shipment.captured if each.left_because]
    for text in (*texts, *shipment.hints):
        warnings.warn(text, LargeDataWarning, stacklevel=level_outside())
