"""Our own benchmark prompts: six kinds of work, from much repetition of the prompt to none."""

from __future__ import annotations

_INVENTORY = """\
class Inventory:
    def __init__(self):
        self.items = {}

    def add(self, name, count):
        if name in self.items:
            self.items[name] += count
        else:
            self.items[name] = count

    def remove(self, name, count):
        if name not in self.items:
            print("no such item: " + name)
            return
        self.items[name] -= count
        if self.items[name] <= 0:
            del self.items[name]

    def total(self):
        result = 0
        for name in self.items:
            result += self.items[name]
        return result
"""

_PARSER = """\
def parse_line(line):
    parts = line.split(",")
    name = parts[0]
    age = int(parts[1])
    city = parts[2]
    return {"name": name, "age": age, "city": city}

def parse_file(path):
    people = []
    f = open(path)
    for line in f.readlines():
        people.append(parse_line(line))
    f.close()
    return people
"""

_TEMPERATURES = """\
function toFahrenheit(celsius) {
  var result = celsius * 9 / 5 + 32;
  return result;
}

function toCelsius(fahrenheit) {
  var result = (fahrenheit - 32) * 5 / 9;
  return result;
}

function average(values) {
  var sum = 0;
  for (var i = 0; i < values.length; i++) {
    sum += values[i];
  }
  return sum / values.length;
}
"""

_QUERY = """\
SELECT c.name, o.id, o.total
FROM customers c, orders o
WHERE c.id = o.customer_id
AND o.total > 100
AND o.created_at > '2024-01-01'
ORDER BY o.total DESC;
"""

_FERRY = """\
The council voted on Tuesday to keep the winter ferry between Nord Harbour and the island of Selk
for at least three more years. The service, which carries about 40 passengers a day between
November and March, was to be closed in the autumn because the old boat no longer meets safety
rules. Under the plan that was agreed, a smaller electric boat will be leased from a yard in the
south of the country, and the number of daily crossings will fall from six to four. Islanders had
collected 2,100 signatures against the closure, more than the island has inhabitants. "People
signed who spend a week here each summer," said Ida Brandt, who runs the shop by the pier. "They
understood that without a ferry in winter there is no shop in summer." The opposition called the
lease too dear and asked for a bridge instead, which engineers estimate at forty times the cost."""

_BEES = """\
Solitary bees make up most of the bee species in the region, yet few people would recognise one.
Unlike honeybees they have no hive, no queen and no honey. Each female digs her own nest, often in
bare sandy ground, and fills it with small chambers. Into each chamber she puts a ball of pollen
and nectar and lays one egg on it; then she closes the chamber and never sees her offspring. The
larva eats the pollen ball, spends the winter underground and leaves the nest the next spring, in
many species within a few days of the first willow blossom. Because the bees fly only for four to
six weeks, a cold April can cost a population most of its young. Gardeners can help by leaving a
square metre of sunny ground unplanted and by letting the willow stand."""

_MEETING = """\
Minutes, 14 May. Present: Amara, Jonas, Li, Petra. Amara reported that the new library catalogue
went live on Monday and that 312 readers have logged in since. Two faults are known: the search
ignores umlauts, and reservations made on a telephone are sometimes shown twice. Jonas will ask
the supplier for a fix before the end of the month. Li presented three offers for the reading-room
chairs; the committee chose the second, 64 chairs for 9,600 euros, because of the five-year
warranty. Petra said that the summer reading club needs six more volunteers and a room on Thursday
afternoons. The room was granted. The next meeting is on 11 June at six o'clock."""

_GLACIER = """\
The Halden glacier lost more ice last year than in any year since measurements began in 1958. Its
tongue withdrew by 71 metres, and the surface at the lowest stake sank by 4.2 metres. The survey's
leader, Marek Olin, puts this down to two things that came together: a winter with a third less
snow than usual, and dust from the desert that fell in March and made the snow darker, so that it
took up more sunlight. In June the last year's snow had gone even at 2,900 metres. The meltwater
filled the reservoir below to the brim in July, three weeks early, and the power company sold the
surplus; in September, when it usually comes, there was none left."""


def _edit(instruction: str, code: str, language: str = "python") -> str:
    return f"{instruction} Write out the whole code again.\n\n```{language}\n{code}```"


BUILTIN: dict[str, list[str]] = {
    "code_edit": [
        _edit("Rename the class to Stock and the method total to count_all.", _INVENTORY),
        _edit("Add type hints to all functions, and use a with statement.", _PARSER),
        _edit("Replace var by const or let.", _TEMPERATURES, "javascript"),
        _edit("Rewrite this query with an explicit JOIN.", _QUERY, "sql"),
        _edit("Raise KeyError in remove instead of printing.", _INVENTORY),
    ],
    "code": [
        "Write a Python function that returns the n-th row of Pascal's triangle, with a docstring.",
        "Write a Python class for a queue made of two stacks, with put, get and len.",
        "Write a shell script that renames all .jpeg files in a folder to .jpg.",
        "Write a JavaScript function that groups a list of objects by the value of a key.",
        "Write a Python function that merges overlapping intervals, and three tests for it.",
    ],
    "summarization": [
        f"Summarise this text in two sentences:\n\n{_FERRY}",
        f"Summarise this text for a child of ten:\n\n{_BEES}",
        f"List the decisions and the open tasks in these minutes:\n\n{_MEETING}",
        f"What are the three main facts in this text?\n\n{_GLACIER}",
    ],
    "grounded_qa": [
        f"{_FERRY}\n\nWhy was the ferry to be closed, and what will replace the old boat? Quote "
        "the sentences that say so.",
        f"{_BEES}\n\nWhy is a cold April dangerous for solitary bees?",
        f"{_MEETING}\n\nWhich chairs were chosen, at which price, and why?",
        f"{_GLACIER}\n\nWhat made the snow melt sooner than usual?",
    ],
    "rewriting": [
        f"Correct nothing but write all numbers in this text as words:\n\n{_MEETING}",
        f"Rewrite this text in the present tense:\n\n{_GLACIER}",
        f"Turn this text into a list of short bullet points:\n\n{_FERRY}",
        "Make this message polite, and keep it short: You still have my bike pump. I asked twice. "
        "Bring it back tomorrow or buy me a new one, I need it for the tour on Saturday.",
    ],
    "chat": [
        "What should I pay attention to when I buy a used piano?",
        "Explain why the sky is dark at night although there are so many stars.",
        "Plan a birthday picnic for eight people, one of them vegan, with a shopping list.",
        "Write a short story about a clock that runs backwards for one hour a day.",
        "My tomato plants have yellow leaves at the bottom. What can be the reasons?",
    ],
}
"""Category -> messages."""
