"""The order of uses, against a list."""

from random import Random

from sojourn.metrics.memory.lru_stack import SMALLEST, LruStack


def test_it_is_a_list_in_order_of_use_that_knows_the_weight_above_each_entry():
    dice, stack, plain = Random(0), LruStack(), []  # [key, weight], oldest first
    for number in range(4 * SMALLEST):
        if plain and dice.random() < 0.45:
            entry = dice.choice(plain)
            by = dice.randint(1, entry[1])
            stack.shrink(entry[0], by)
            entry[1] -= by
            plain = [each for each in plain if each[1]]
        elif plain and dice.random() < 0.1:
            assert stack.pop_oldest() == plain.pop(0)[0]
        else:
            key, weight = dice.randrange(300), dice.randint(1, 5)
            stack.push(key, weight)
            plain = [*(each for each in plain if each[0] != key), [key, weight]]
        if number % 97 == 0 or SMALLEST - 3 < number < SMALLEST + 3:
            assert list(stack) == [key for key, _ in plain] and stack.total == sum(weight for _, weight in plain)
            for place, (key, _) in enumerate(plain):
                assert stack.above(key) == sum(weight for _, weight in plain[place + 1 :])
