"""Ray and Serve for the tests of this folder: started for the first of them, stopped after the last."""

import pytest


@pytest.fixture(scope="package")
def deploy():
    """`serve.run` with nothing else to say; ray is imported here so that collecting is light."""
    import ray
    from ray import serve

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)  # never somebody's running cluster
    serve.start(proxy_location="Disabled", http_options={"host": "127.0.0.1"})
    yield lambda application, name: serve.run(application, name=name, route_prefix=None)
    serve.shutdown()
    ray.shutdown()
