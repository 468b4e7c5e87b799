"""What processes of servers inherit."""

from gymrl.gym.policy_key import without_key


def test_servers_inherit_neither_the_policys_key_nor_gymrls_own_secrets():
    environment = {
        "PATH": "/bin",
        "OPENAI_API_KEY": "sk-1234",
        "JUDGE_KEY": "sk-judge",
        "GYMRL_SECRET": "of-links-between-nodes",
        "GYMRL_VIEW_TOKEN": "of-the-viewer",
    }
    assert without_key(environment, "OPENAI_API_KEY") == {"PATH": "/bin", "JUDGE_KEY": "sk-judge"}
    assert without_key(environment, None).keys() == {"PATH", "OPENAI_API_KEY", "JUDGE_KEY"}
