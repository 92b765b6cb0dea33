"""TLS: the certificate must be for the name in the URL, whatever the address."""

import asyncio
import ssl

import pytest
from http_peers import Authority

from tickwheel.http import ConnectFailed


async def test_the_urls_name_is_sent_and_checked(stage):
    tls = stage.authority.context("shop.example")
    asked = []
    tls.sni_callback = lambda _, name, __: asked.append(name)
    server, pool = await stage.server(tls=tls), stage.pool()
    assert (await pool.request("GET", server.url(host="shop.example"))).status == 200
    assert asked == ["shop.example"]
    assert dict(server.requests[0][1])["host"] == f"shop.example:{server.port}"


async def test_a_name_may_end_with_a_dot(stage):
    server, pool = await stage.server(tls=stage.authority.context("shop.example")), stage.pool()
    assert (await pool.request("GET", server.url(host="shop.example."))).status == 200


async def test_an_address_is_checked_as_an_address(stage):
    server, pool = await stage.server(tls=stage.authority.context("127.0.0.1")), stage.pool()
    assert (await pool.request("GET", server.url(host="127.0.0.1"))).status == 200


@pytest.mark.parametrize("host", ["other.example", "127.0.0.1", "shop.example.evil.example"])
async def test_a_certificate_for_another_name_is_refused(stage, host):
    server, pool = await stage.server(tls=stage.authority.context("shop.example")), stage.pool()
    with pytest.raises(ConnectFailed, match=rf"{host}:{server.port}: its certificate is refused"):
        await pool.request("GET", server.url(host=host))
    assert not server.requests


async def test_a_certificate_of_an_unknown_authority_is_refused(stage):
    server = await stage.server(tls=Authority().context("localhost"))
    with pytest.raises(ConnectFailed, match=r"certificate is refused: .*SSL_CERT_FILE"):
        await stage.pool().request("GET", server.url())


async def test_the_systems_authorities_are_the_default(stage):
    server = await stage.server(tls=stage.authority.context("localhost"))
    with pytest.raises(ConnectFailed, match="certificate is refused"):
        await stage.pool(ssl=None).request("GET", server.url())


async def test_a_server_without_tls_is_connect_failed(stage):
    async def plain(connection):
        await connection.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await connection.gone()

    server = await stage.server(plain)
    with pytest.raises(ConnectFailed, match=f"localhost:{server.port}: TLS failed"):
        await stage.pool().request("GET", f"https://localhost:{server.port}/")


async def test_a_server_of_an_old_protocol_is_connect_failed(stage):
    tls = stage.authority.context("localhost")
    tls.minimum_version = ssl.TLSVersion.TLSv1_3
    client = stage.authority.client()
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    server, pool = await stage.server(tls=tls), stage.pool(ssl=client)
    with pytest.raises(ConnectFailed, match=rf"localhost:{server.port}: (TLS|it closed)"):
        await pool.request("GET", server.url())


async def test_tls_connections_are_reused_and_bounded(stage):
    server = await stage.server(tls=stage.authority.context("localhost"))
    pool = stage.pool(connections=2)
    await asyncio.gather(*(pool.request("GET", server.url()) for _ in range(10)))
    assert len(server.connections) <= 2


async def test_an_idle_tls_connection_is_closed_with_a_shutdown(stage):
    server = await stage.server(tls=stage.authority.context("localhost"))
    pool = stage.pool(idle_timeout=0.02)
    await pool.request("GET", server.url())
    await server.connections[0].ended.wait()
    while pool.stats()["connections"]:
        await asyncio.sleep(0)


async def test_cancelling_at_any_moment_while_connecting_leaves_nothing(stage):
    server = await stage.server(tls=stage.authority.context("localhost"))
    for turns in range(40):
        pool = stage.pool(connections=1)
        calls = [asyncio.create_task(pool.request("GET", server.url())) for _ in range(2)]
        for _ in range(turns):
            await asyncio.sleep(0)
        calls[0].cancel()
        await asyncio.wait(calls)
        assert calls[1].result().status == 200
        await pool.close()
        assert not pool.stats()["connections"]
        assert not pool._origins
