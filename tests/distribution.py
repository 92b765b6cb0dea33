"""How a run with several workers is divided among them: by files, and the long ones first.

Files that use the same servers, which are slow to start, are divided as one.
"""

from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
SPREAD = {"test_asyncio_suite.py", "test_pure_timers.py"}  # each test is a long process of its own
# Each worker that had one of these would start RabbitMQ and Kafka.
BROKER_FILES = """
    contracts/test_source.py contracts/test_channel.py consumer/test_kill.py
    durable/channels/test_kafka.py durable/channels/test_rabbitmq.py
    durable/channels/test_celery.py durable/channels/test_stuck_broker.py
    durable/channels/test_idle_connection.py
    celery_app/test_release.py celery_app/test_workers.py test_channel_docs.py
"""
BROKERS = BROKER_FILES.split()
# Few but long tests. By the number of its tests such a file would begin last, and one worker would
# end long after the others.
LONG_FILES = """
    chaos/test_chaos.py test_instructions.py service/test_kill.py test_tutorial_service.py
    test_wheel_stateful.py test_durable_benchmark.py durable/test_clock_steps.py
    durable/test_tutorial.py contracts/test_store_stateful.py service/test_cluster.py
    service/test_takeover.py durable/stores/postgres/test_plans.py durable/test_faults.py
    test_servers.py web/test_supervisor.py durable/test_forks.py service/test_descriptors.py
    service/test_receivers.py durable/test_processes.py durable/test_kill.py
    contracts/test_tasks_lists.py durable/test_stories.py
    durable/coordinators/test_zookeeper.py service/test_failover.py
    service/test_zookeeper.py service/test_standstill.py service/test_attack.py
    test_service_benchmark.py test_scale_benchmark.py test_readme_service.py
    durable/steps/test_large_payloads.py durable/steps/test_functions_elsewhere.py
    durable/channels/test_broker_kill.py
    durable/stores/postgres/test_migration.py test_package.py web/test_server.py
    web/test_browser.py test_install_docs.py test_migrate_docs.py soak/test_soak.py
"""
LONG = LONG_FILES.split()


def name_of(item):
    return item.path.relative_to(HERE).as_posix()


def begin_with_long_files(items):
    """Sort the tests by files: spread ones, brokers, long ones, then by the number of tests."""
    counts = Counter(map(name_of, items))
    ranks = {name: rank for rank, name in enumerate([*sorted(SPREAD), *BROKERS, *LONG])}
    order = {name: (ranks.get(name, len(ranks)), -counts[name], name) for name in counts}
    items.sort(key=lambda item: order[name_of(item)])


def make_scheduler(config, log):
    """Keep the tests of a file on one worker with --dist loadfile, except the files in SPREAD."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class SpreadingScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            if file.removeprefix("tests/") in BROKERS:
                return "brokers"
            return nodeid if Path(file).name in SPREAD else file

    config.option.loadscopereorder = False  # `begin_with_long_files` has sorted them
    return SpreadingScheduling(config, log)
