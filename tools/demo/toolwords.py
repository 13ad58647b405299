"""Words around tools: other names for arguments and verbs, families of tools, frames for requests."""

ALIASES = {
    "city": "location place town city_name destination",
    "location": "city place town",
    "query": "q text search_query keywords term",
    "path": "file file_path filename target",
    "name": "title label id",
    "title": "name subject heading",
    "person": "name user contact",
    "to": "recipient email address receiver",
    "text": "content message body input",
    "message": "text body content",
    "minutes": "duration length time_minutes",
    "order_id": "order id order_number",
    "service": "name app service_name",
    "amount": "sum value total",
    "topic": "subject query about",
    "user": "username user_name account",
    "number": "id n index",
    "host": "server machine hostname",
    "level": "value percent",
    "date": "day when",
    "time": "at when start",
    "url": "link address page uri",
}


# Words that people use for one another in requests; "_" stands for a space.
_GROUPS = """show display list|find locate look_up|search look_through scan|delete remove erase wipe|create make set_up|
add append put_in|send pass deliver|get fetch give_me bring_me|start begin launch|stop end halt|change alter modify|
check verify look_at|compute calculate work_out|book reserve|buy purchase get|cancel call_off drop|update refresh renew|
save store keep|open bring_up|close shut|picture image photo|mail email message|price cost|file document|folder directory|
message note text|weather conditions|song track tune|movie film|car vehicle|house home building|doctor physician|
big large|small little|near close_to around|next following|current present latest|number amount count|name title label|
place location spot|trip journey|job position|task item job|meeting appointment event|person user|shop store|money cash|
print put_on_paper|repair fix mend|clean wash|build construct|compare contrast|measure gauge|move shift transfer|
rename relabel|approve accept okay|decline reject refuse|assign give hand|notify tell inform alert|plan schedule arrange|
pay settle|rate grade score|share send pass_on|submit hand_in file|track follow trace|test try check|upload put_up|
download pull get|watch observe monitor|want need|need require want|tell_me let_me_know|all every|lock secure|
unlock open_up|merge combine join|split divide separate|convert change|translate render|reset clear|restart reboot|
review go_over|record log note_down|order request buy|play put_on|describe explain tell_about|
disable switch_off turn_off|enable switch_on turn_on|rent hire lease|trim cut shorten|sort order arrange|select pick choose"""
SYNONYMS: dict[str, list[str]] = {}
_VAGUE = {"get", "give", "hand", "turn", "make", "pass", "set", "up", "want", "need", "pull", "okay"}
for _group in _GROUPS.replace("\n", "").split("|"):
    for _word in set(_group.split()) - _VAGUE:
        SYNONYMS.setdefault(_word, []).extend(o.replace("_", " ") for o in _group.split() if o != _word)

# Ways to ask for any tool by its own words: {t} its name, {d} its description, {a} the arguments.
PLAIN = (
    "call {t} with {a}",
    "use {t} with {a}",
    "use {t}: {a}",
    "{d}: {a}",
    "{d}. {a}",
    "run {t} for {a}",
    "{d} with {a}",
    "{t} {a}",
)
CONTEXT = """I'm in a hurry.|My boss asked for this.|I have a small problem.|This is important.|Let's see.|One thing is still open.|
It has been a long day.|Something came up.|I am back at my desk.|Here is what I need.|We talked about it yesterday.|I almost forgot.|
I can't do it myself.|You can do that, right?|I'm not sure how this works.|Let us continue.|There is one more thing.""".replace(
    "\n", ""
).split("|")

# Families: name | description | slots | requests. {n} and {m} are nouns, {v} a verb; digits are arguments.
FAMILIES = """
get_{n}|Get the {n} of a {m}.|{m}|What is the {n} of {0}?|get the {n} for {0}|tell me {0}'s {n}|I need the {n} of {0}|show me the {n} of {0}|Which {n} does {0} have?|check the {n} of {0}|What {n} does the {m} {0} have?|{n} of {0}?|look at the {n} for {m} {0}|The {m} is {0}. What is the {n}?|I have the {m} {0} here. Which {n} is it?|Do you know the {n} of {0}?|How is the {n} of {0}?|Is there a {n} for {0}?
{v}_{n}|{V} a {n}.|{n}|{v} the {n} {0}|{v} {n} {0}|{v} {0}|the {n} {0} is ready, {v} it|I want to {v} the {n} {0}|{v} a {n} called {0}|There is a {n} named {0}. {V} it.|My {n} is called {0}, please {v} it|It is time to {v} the {n} {0}.|Somebody should {v} {0}.|{0} is a {n}. Can you {v} it?|{v} my {n}. It is {0}.
{v}_{n}|{V} the {n}.|name|{v} the {n} {0}|{v} {n} {0}|{v} the {n} named {0}|use {0} as the {n} and {v} it|We have to {v} the {n} {0}.
create_{n}|Create a new {n}.|name|create a {n} called {0}|make a new {n} named {0}|add a {n}: {0}|I need a new {n}, call it {0}|set up a {n} with the name {0}|start a {n} {0}
delete_{n}|Delete a {n}.|{n}_id|delete {n} {0}|remove the {n} {0}|get rid of {n} {0}|I no longer need the {n} {0}|drop {n} {0}
list_{n}s|List all {n}s of a {m}.|{m}|list the {n}s of {0}|show me all {n}s for {0}|Which {n}s are there in {0}?|What {n}s does {0} have?|give me every {n} of {0}
count_{n}s|Count the {n}s in a {m}.|{m}|How many {n}s are in {0}?|count the {n}s of {0}|tell me how many {n}s {0} has|number of {n}s in {0}?
search_{n}s|Search for {n}s.|query|find a {n} about {0}|search the {n}s for {0}|I am looking for a {n}: {0}|Is there a {n} like {0}?|look for {n}s with {0}|find {0} in the {n}s
set_{n}|Set the {n} to a value.|#value|set the {n} to {0}|change the {n} to {0}|make the {n} {0}|the {n} should be {0}|put the {n} at {0}|turn the {n} to {0}
set_{n}_{m}|Set the {m} of a {n}.|{n} #{m}|set the {m} of {n} {0} to {1}|change {0}'s {m} to {1}|give {n} {0} the {m} {1}|the {m} of {0} must be {1}|{n} {0} needs {m} {1}
send_{n}|Send a {n} to someone.|recipient {n}|send {0} the {n} {1}|send the {n} {1} to {0}|give {0} the {n} {1}|{0} should get the {n} {1}|let {0} have the {n} {1}
order_{n}|Order a {n}.|#quantity {n}|order {0} {1}|I want {0} {1}|buy {0} of {1}|get me {0} {1}|we need {0} {1}, order them
move_{n}|Move a {n} to another {m}.|{n} {m}|move the {n} {0} to {1}|put {n} {0} into {1}|{n} {0} belongs in {m} {1}, move it|bring {0} to {1}
compute_{n}|Compute the {n} from {m} and size.|#{m} #size|compute the {n} with {m} {0} and size {1}|What is the {n} for {m} {0} and size {1}?|work out the {n}: {m} {0}, size {1}
{v}_{n}_{m}|{V} the {m} of a {n}.|{n}|{v} the {m} of {0}|{v} {0}'s {m}|{v} the {n} {m} for {0}|I want to {v} the {m} of the {n} {0}
{n}_lookup|Look up a {n} by its {m}.|{m}|Which {n} has the {m} {0}?|look up the {n} with {m} {0}|find the {n} whose {m} is {0}|What {n} belongs to {0}?
{n}_{m}|Find the {m} that belongs to a {n}.|{n}|What is the {m} for the {n} {0}?|Where is the {m} of {0}?|I need a {m} for {n} {0}|find a {m} for {0}
get_current_{n}|Get the current {n}.||What is the current {n}?|show the {n}|tell me the {n}|get the current {n}|Which {n} is it now?|How is the {n}?
{x}|Run {x} on a {n}.|{n}|run {x} on {0}|{x} {0}|use {x} with {0}|I want {x} for {0}|apply {x} to the {n} {0}|do a {x} of {0}
{x}_{n}|Tell the {n} of a {m}.|{m}|What {n} does {0} have?|tell me the {n} of the {m} {0}|find out {0}'s {n}|{n} for {0}?
assign_{n}|Assign a {n} to a person.|{n} person|assign {n} {0} to {1}|give the {n} {0} to {1}|{1} takes the {n} {0}|let {1} have {n} {0}
schedule_{n}|Schedule a {n}.|{n} date|schedule the {n} {0} for {1}|plan {n} {0} on {1}|the {n} {0} should take place on {1}|put the {n} {0} on {1}
""".strip().splitlines()

KINDS = "person city label word id email file brand noun fullname title date int anyone phrase city person word".split()
RESULT_KINDS = "int word adjective float id brand phrase date person city".split()
