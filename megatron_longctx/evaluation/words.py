"""Words that tasks are made of: an adjective and a noun, as in RULER, from lists of our own."""

from __future__ import annotations

from random import Random

_ADJECTIVE_LIST = """
able agile amber ample ancient arctic autumn azure basic bitter black blank blue bold brave brief bright brisk broad
bronze brown busy calm careful cheap chief civil clean clear clever cloudy coastal cold common cosmic costly cozy
crimson crisp curious curly daily damp daring dark deep dense distant double dry dusty eager early earthy easy elder
electric empty equal exact faint fair famous fancy fast fertile few final fine firm first flat fluent foggy fond
foreign formal fragile frank free fresh frosty full funny gentle giant glad global golden good grand grave gray great
green half handy happy harsh hasty heavy hidden high hollow honest huge humble icy ideal idle inner ivory joint jolly
joyful keen kind large last late lazy lean light little lively local lonely long loose loud low loyal lucky magic
major mellow mighty mild minor modern modest moist narrow native neat new nimble noble noisy north novel oak ocean odd
old olive open orange outer pale patient plain polite poor private proud pure purple quick quiet rapid rare ready red
rich rigid ripe robust rocky rough round royal rural rusty sad safe salty sandy scarlet secret senior sharp shiny
short shy silent silver simple single sleepy slim slow small smart smooth snowy soft solar solid sour south spare
stable steady steep stiff still stone strange strict strong sunny super sweet swift tall tame tender thick thin tidy
tiny tough true urban useful vast velvet violet vital warm wary weak wealthy west wet white whole wide wild windy
winter wise wooden young
"""
_NOUN_LIST = """
acorn actor album anchor angle ankle answer apple arch arena armor arrow artist atlas attic badge bagel baker balance
ball banana band bank barn basin basket battery beach beacon bean bear beard bell bench berry bird blanket board boat
bolt book boot border bottle bowl branch bread brick bridge broom bucket bus butter button cabin cable cactus camel
camera canal candle canoe canyon card cargo carpet castle cave cedar cello chain chair chalk cherry chess chin circle
city clay cliff clock cloud clover coach coat coin comet compass copper coral corner cotton cousin cradle crane crater
creek crown cup curtain daisy dance desert desk diamond diary dish doctor dolphin donkey door dragon drawer dream drum
duck eagle easel elbow elm engine falcon farm feather fence fern ferry fiddle field finger flag flame flute forest
fork fossil fountain fox frame frog garden garlic gate ghost giraffe glacier glass globe glove goat grape grass guitar
hammer harbor harp hat hawk hedge helmet heron hill honey horizon horse hotel island jacket jar jewel jungle kettle
key kite kitten knot ladder lagoon lake lamp lantern lawn leaf lemon letter library lily lion lizard locket lumber
lunch magnet mango map maple marble market meadow melon mirror mitten monkey moon moth motor mountain mouse museum
nail needle nest notebook oar oven owl paddle page palace panda paper parrot path peach pearl pebble pencil pepper
piano picnic pillow pilot pine planet plate plum pocket poem pond pony porch potato prism pumpkin puzzle quilt rabbit
radio raft rain ribbon ring river road robin rocket roof root rope rose sail salad salt sand saucer scarf school seal
seed shelf shell ship shoe shore shovel sister sky sled snail soap sock song spider spoon spring square squirrel stair
stamp star statue stove straw street sugar sun swan table teapot temple tent thread throne thumb tiger timber toast
tomato torch tower town trail train tree trumpet tulip tunnel turtle umbrella valley vase village violin wagon wall
walnut water whale wheat wheel whistle willow window wing wolf wood wool yard zebra
"""
_ADJECTIVES, _NOUNS = (text.split() for text in (_ADJECTIVE_LIST, _NOUN_LIST))
MOST_WORDS = len(_ADJECTIVES) * len(_NOUNS)


def some_words(count: int, draw: Random) -> list[str]:
    """Different ones, such as `brave-river`; `MOST_WORDS` at most."""
    numbers = draw.sample(range(MOST_WORDS), count)
    return [f"{_ADJECTIVES[number % len(_ADJECTIVES)]}-{_NOUNS[number // len(_ADJECTIVES)]}" for number in numbers]
