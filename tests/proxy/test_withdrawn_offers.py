"""An offered task whose episode is cancelled leaves no session, whenever that happens."""

import asyncio

import pytest


@pytest.mark.parametrize("when", ["before it is taken", "as it is taken", "after it is taken"])
async def test_a_cancelled_offer_leaves_no_session(proxy, when):
    proxy.online.offers_only = True
    offer = asyncio.create_task(proxy.online.offer(proxy.open_session, {"answer": "1259"}))
    await asyncio.sleep(0)
    if when != "before it is taken":
        online = proxy.online.open()
        assert online.task == {"answer": "1259"}
    if when == "after it is taken":
        await asyncio.sleep(0)
    offer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await offer
    assert (len(proxy.online), len(proxy)) == (0, 0)
