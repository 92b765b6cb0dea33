"""The URL of a ZooKeeper ensemble."""

import pytest

from tickwheel.values.zookeeper_url import ZooKeeperUrl


def test_it_has_servers_and_a_path():
    url = ZooKeeperUrl.parse("zookeeper://h1:2181,h2:2181/prod/tickwheel/")
    assert url == ("h1:2181,h2:2181", "/prod/tickwheel", "", False, {})


def test_without_a_path_it_has_a_default():
    assert ZooKeeperUrl.parse("zookeeper://h1:2181").root == "/tickwheel"


def test_it_has_credentials_and_tls():
    url = ZooKeeperUrl.parse("zookeeper://me:p%40ss@h:2281/x?tls=true&ca=/ca.pem&key=/key.pem")
    assert url.credentials == "me:p@ss"
    assert (url.tls, url.files) == (True, {"ca": "/ca.pem", "keyfile": "/key.pem"})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("zookeeper:h:2181", "must look like"),
        ("zookeeper:///path", "must look like"),
        ("zookeeper://h1,,h2/path", "must look like"),
        ("zookeeper://me:secret@/path", "must look like"),
        ("zookeeper://me@h:2181", "must be user:password"),
        ("zookeeper://h:2181/x?speed=high", "may have tls=true"),
        ("zookeeper://h:2181/x?tls=perhaps", "may have tls=true"),
    ],
)
def test_a_wrong_one_is_refused_without_its_password(text, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        ZooKeeperUrl.parse(text)
    assert "secret" not in str(refused.value)
