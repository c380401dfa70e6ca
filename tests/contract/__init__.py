import pytest

pytest.register_assert_rewrite("tests.contract.runtimes")  # so that its failures say what was found
