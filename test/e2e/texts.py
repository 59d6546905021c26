"""Natural text for the servers under test."""

STORY = """\
The lighthouse on the northern point had been dark for eleven winters when the new keeper arrived. She came by
the supply boat, with two trunks, a crate of lamp oil and a clock that had belonged to her grandmother. The
boatman would not carry her things past the landing, so she hauled them up the path herself, one at a time,
resting at every turn where a flat stone had been set into the bank. From the last turn she could see the
whole bay: the fishing town on the far side, its roofs the colour of wet sand, the long grey arm of the
breakwater, and between them the channel that the charts marked in red because of the rocks that lay just
under the surface at half tide.

Inside, the tower smelled of salt and old paper. The previous keeper had left in a hurry. His log lay open on
the table, the last entry broken off in the middle of a word, and beside it stood a cup with a dry brown ring
at the bottom. She read the log that first evening by the light of a candle. Most of it was weather: wind from
the west, wind from the south-west, fog, fog, clear, a ship sighted and not named. But toward the end the
entries grew longer. He wrote that the light seemed to burn lower each night although he filled it to the
brim, and that something in the mechanism that turned the lens had begun to tick out of time with the clock on
the wall. He had taken the gears apart three times and found nothing wrong with them. On the last page he had
drawn the lens from above, eight panels around a centre, and had marked one of them with a cross.

In the morning she climbed to the lantern room. The lens was taller than she was, a beehive of glass prisms in
a brass frame, green with age at the joints. She counted the panels and found the one with the cross. There
was no crack in it and no stain, but when she laid her palm against the glass it was warm, while the seven
others were as cold as the sea. She stood there for some time with her hand on the pane. Then she went down,
unpacked her grandmother's clock, wound it, and set it on the shelf beside the one that was already there. The
two of them ticked together for a minute, then apart, then together again, like people who walk side by side
and keep losing and finding the same step.

The first ship she guided in was a timber carrier with a broken rudder. It came up the channel at dusk with
the wind behind it, far too fast, and she could see from the gallery that the helmsman was steering by the
breakwater and not by the light. She did what the manual said she should never do. She stopped the lens, so
that the warm panel faced the ship, and held it there with both hands while the gears strained and the two
clocks below fell silent. For as long as she held it a path of still water lay in front of the bow, straight
and bright as a road, and the carrier ran along it past the red rocks and into the harbour without touching
anything at all."""

QUESTIONS = [
    "Why did the previous keeper leave the lighthouse?",
    "Describe the fishing town across the bay and its people.",
    "Write the entry that the new keeper put into the log that night.",
    "What could make one panel of the lens warm? Give three explanations.",
    "Tell the story again from the point of view of the boatman.",
    "What happens in the second winter?",
    "Explain how a lighthouse lens works.",
    "Write a letter from the captain of the timber carrier to his sister.",
]


def chat(*turns: str) -> str:
    """User and assistant turns in SmolLM2's chat format, ending where the assistant speaks."""
    roles = ("user", "assistant")
    said = "".join(f"<|im_start|>{roles[i % 2]}\n{turn}<|im_end|>\n" for i, turn in enumerate(turns))
    return said + "<|im_start|>assistant\n"


def prompt_ids(seed: int, length: int) -> list[int]:
    """A prompt of token ids that no other seed shares a prefix with."""
    return [(7919 * (seed + 1) + 104729 * i) % 40000 + 100 for i in range(length)]
