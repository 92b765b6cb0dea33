"""`install(app, url)`: a Celery app's `eta` and `countdown` move from worker memory to tickwheel.

Needs `pip install 'tickwheel[celery]'`. This package must not know the scheduler.
"""

try:
    from tickwheel.celery.install import install
except ImportError as missing:
    raise ImportError(f"{missing}; for Celery: pip install 'tickwheel[celery]'") from missing

__all__ = ["install"]
