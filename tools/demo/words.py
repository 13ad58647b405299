"""Word lists for the demo model's training text.

Everything the generator says is built from these lists, from made-up words (values.py) and from the sentences in
the sibling modules, so the training text needs no download and repeats exactly from a seed.
"""

FIRST_NAMES = """
Aaron Abena Adam Adaeze Agnes Ahmed Aiko Aisha Alan Albert Alejandro Alex Alice Alina Amanda Amara Amir Amit Amy Ana
Anders André Andrea Angela Anika Anna Anton Antonio Anya Ara Aria Arjun Arthur Asha Astrid Aurélie Ava Ayumi Beata
Ben Beatriz Bella Benoît Bernd Beth Bianca Björn Boris Brian Bruno Camila Carla Carlos Carmen Caroline Cécile Chen
Chiara Chloé Chris Clara Colin Connor Cora Craig Cyrus Dalia Dan Daniel Daria David Deepa Deniz Derek Diana Diego
Dinesh Dmitri Dora Eddie Edgar Edith Elena Eli Elif Elin Ella Ellen Elsa Emeka Emil Emily Emma Enrique Eric Erin
Esra Esther Eva Ewa Fatima Felix Finn Fiona Flora Frank Freya Frida Gabriel Gareth Gary Gemma George Gina Giorgio
Giulia Grace Greta Gustav Hamid Hana Hannah Hans Harold Harriet Hassan Heather Hector Heidi Helen Henrik Henry Hiro
Hugo Ian Ibrahim Ida Igor Ilse Imani Ines Ingrid Irene Iris Isaac Isabel Ivan Ivy Jack Jacob Jade Jakub James Jan
Jane Jasmine Javier Jean Jenny Jin Joan Joel Johan John Jonas Jordan José Joseph Judith Julia Julian Jun Jürgen Kai
Kamal Karen Karim Karl Kate Kavya Keiko Ken Kevin Kira Kofi Kurt Lars Laura Leila Lena Leo Leon Lily Linda Ling Lisa
Liv Lorenzo Louis Lucas Lucia Luis Lukas Luna Lydia Magnus Maja Manuel Marco Margaret Maria Marie Mario Mark Marta
Martin Mary Mateo Matteo Maya Mei Mehmet Mia Michael Miguel Mika Milan Mina Miriam Mohammed Mona Nadia Naomi Natalie
Nina Nikhil Nils Noah Noor Nora Olaf Olga Oliver Olivia Omar Oscar Otto Pablo Paolo Patricia Paul Pedro Peter Petra
Philip Pia Pierre Piotr Priya Quentin Rachel Rafael Rahul Raj Ramona Ravi Rebecca Renée Rita Robert Rosa Rose Rui
Ruth Ryan Sabine Sam Samira Sandra Sanjay Sara Sean Selma Sergei Shira Simon Sofia Søren Stefan Stella Sven Sylvia
Takeshi Tamar Tanya Tara Teresa Theo Thomas Tim Tina Tobias Tom Tomás Ulrike Uma Uri Ursula Vera Victor Vijay Viola
Wanda Wei Wendy Will Xavier Yara Yasmin Yuki Yusuf Yvonne Zainab Zara Zoë Zofia Łukasz Ömer Émile Ángel Øystein
""".split()

LAST_NAMES = """
Abbott Adeyemi Almeida Andersson Bauer Becker Bennett Bianchi Brandt Brooks Carter Castillo Chang Cohen Costa Dahl
Delgado Dietrich Dubois Evans Fernández Fischer Foster Fujita García Gibson Gomes Gupta Haddad Hansen Hayes Hoffmann
Hughes Ibrahim Ito Jansen Jensen Johnson Kaplan Kato Keller Khan Kim Klein Kowalski Kumar Larsen Laurent Lee Lindgren
Lopez Marino Martin Meyer Mitchell Moreau Müller Nakamura Nguyen Novák Nowak Okafor Olsen Ortiz Park Patel Pereira
Petrov Phillips Popescu Quinn Ramos Reid Ricci Rossi Sato Schmidt Shah Silva Singh Smith Sørensen Souza Stewart Suzuki
Tanaka Taylor Torres Turner Vargas Vogel Wagner Walker Weber Williams Wong Wright Yilmaz Young Zhang Ziegler
""".split()

CITIES = """
Aarhus|Aberdeen|Accra|Adelaide|Agra|Albany|Algiers|Alicante|Amman|Amsterdam|Ankara|Antwerp|Atlanta|Auckland|Austin|
Baku|Bangalore|Barcelona|Bari|Basel|Bath|Beirut|Belfast|Bergen|Bilbao|Birmingham|Bogotá|Bologna|Bonn|Bordeaux|Boston|
Brest|Brighton|Brisbane|Bristol|Bruges|Bucharest|Buffalo|Cádiz|Calgary|Cambridge|Cape Town|Cardiff|Chennai|Chicago|
Cincinnati|Cologne|Cork|Córdoba|Cracow|Dakar|Dallas|Delhi|Denver|Detroit|Dortmund|Dresden|Dundee|Durban|Düsseldorf|
Edinburgh|Essen|Faro|Florence|Frankfurt|Fukuoka|Galway|Gdańsk|Geneva|Genoa|Ghent|Glasgow|Gothenburg|Granada|Graz|
Grenoble|Hamburg|Hanover|Hobart|Hong Kong|Houston|Istanbul|Izmir|Jaipur|Karachi|Kiel|Kobe|Kolkata|Kraków|Kyoto|Lagos|
Lahore|Lausanne|Leeds|Leipzig|Lille|Limerick|Linz|Liverpool|Łódź|Los Angeles|Lucerne|Lyon|Madison|Malaga|Malmö|
Manchester|Marrakesh|Marseille|Medellín|Melbourne|Memphis|Miami|Milan|Minneapolis|Mombasa|Montreal|Mumbai|Munich|
Nagoya|Nantes|Naples|Nashville|New Orleans|New York|Newcastle|Nice|Nuremberg|Oakland|Odense|Orlando|Osaka|Oxford|
Padua|Palermo|Perth|Philadelphia|Phoenix|Pisa|Pittsburgh|Plymouth|Portland|Porto|Poznań|Pune|Quebec|Reims|Riga|Rio|
Rotterdam|Salzburg|San Diego|San Francisco|Santiago|São Paulo|Sapporo|Seattle|Seville|Shanghai|Sheffield|Siena|Split|
Stuttgart|Surat|Sydney|Tampa|Tampere|Tel Aviv|Toledo|Toronto|Toulouse|Trieste|Tromsø|Trondheim|Turin|Turku|Uppsala|
Utrecht|Valencia|Vancouver|Venice|Verona|Wellington|Winnipeg|Wrocław|Yokohama|York|Zagreb|Zaragoza|Zürich|Málaga
""".replace("\n", "").split("|")

NOUNS = """
account actor address album alarm anchor angle animal answer apple apron arch arrow article asset atlas auction award
badge bag bakery balance ball band bank banner barn barrel basket battery beach beacon bean bed bell bench bike bill
bird blanket block board boat bond bone book boot border bottle bowl box branch bread brick bridge broom brush bucket
budget bug building bulb bus button cabin cable cake calendar camera camp candle canvas cap car card cargo carpet
case castle catalog cellar chain chair chapter chart cheese chest chimney circle circuit class clause client cliff
clinic clock cloud club coach coat code coffee coin collar colour column comet contract cookie copy corner cottage
counter coupon course court cover crane crate credit crop crown cup curtain customer cycle dam dance deal debt deck
delivery desert desk device diagram dial dish district doctor document dollar door draft drawer dress drill driver
drum duck duty eagle edge egg elbow engine entry envelope error estate event exam exhibit export fabric factory fan
farm fee feeder fence ferry field file film filter fire fish flag flame flight floor flower flute folder forest fork
form fossil fountain frame freight fridge fruit fuel fund game garage garden gate gauge gear ghost gift glacier glass
glove goal goat gold grain grant grape graph grid group guest guide guitar hall hammer handle harbour harvest hat heart
heater hedge helmet herb hill hinge hive holiday hook horse hospital hotel house idea image index ink insect invoice
iron island issue item ivory jacket jar jewel job journal journey judge juice jump kettle key kitchen kite knee knife
label ladder lake lamp land lantern latch lawn layer leaf lease ledger lemon lens lesson letter level lever library
licence lift light limit link lion list loan lock locker log loop lunch machine magnet mail mango map marble margin
market mask match meal medal meeting melody member memo menu message metal meter milk mill mine mirror mission mixer
model module monitor moon motor mountain mouse museum mushroom nail napkin needle nest net network note notebook novel
number nurse ocean offer office oil olive onion orange orbit orchard order organ oven owner package page paint pair
palace pan panel paper parade parcel park parrot part party passport password path patient pattern payment peach pearl
pen pencil penguin pepper permit phone photo piano pickle picture pie pillow pilot pin pipe pitch plan plane planet
plant plate player pocket poem pole policy pond pool post poster pot potato power prize product profile project prompt
pump puppet purse puzzle quarry queue quilt quota quote rabbit race radar radio rail rain raft ranch range rate razor
reader receipt recipe record refund region rent repair report reservation ribbon ring river road robot rocket roof room
root rope rose route ruler sail salad sale salt sample sand saw scale scarf schedule school score screen script sea
seal seat seed sensor server shelf shell ship shirt shoe shop shovel signal silk silver sink size skate skill sky sled
sleeve slide snack snow soap sock sofa soil song soup spade speaker spice spider spoon spring squad stable stadium
staff stage stair stamp star station statue steam stem step stock stone stool store storm story stove stream street
string studio subject suit sugar summit sun supplier surface survey switch symbol system table tank tape target task
tax tea team temple tenant tent term test theatre theme thread ticket tide tiger tile timer title toast token tomato
tool tooth torch tour towel tower town toy track tractor trade trail train tray tree trench trip trophy truck trumpet
trunk tube tulip tunnel turtle umbrella unit user valley value valve van vase vault vehicle vendor vessel video village
vine violin visit visitor voice volcano voucher wagon walk wall wallet watch water wave wheat wheel whistle window wing
winter wire wolf wood wool worker workshop yacht yard zebra zone
""".split()

ADJECTIVES = """
active amber ancient annual basic best big black blue bold bright broken brown busy calm cheap clean clear clever cold
common cool cosy crisp curly dark deep digital dry dusty early easy electric empty external fair fancy fast final fine
first fixed flat fluffy formal free fresh friendly full gentle giant glad golden good grand great green grey happy hard
heavy hidden high hollow hot huge hungry internal kind large late lazy light little local lonely long loud lovely low
lucky magic main major mellow mild minor modern monthly narrow native neat new nice noisy northern odd old open orange
outer pale plain polite proud public purple quick quiet rapid rare ready red regular remote rich round rough royal rusty
safe salty secret sharp shiny short silent silver simple slow small smart smooth soft solar sour southern spare special
spicy steady still stormy strange strong sunny sweet swift tall tame thick thin tiny tired urban vast vintage violet
warm weekly wet white wide wild wise wooden yellow young
""".split()

VERBS = """
add adjust analyse approve archive arrange assign attach backup block book build buy calculate call cancel change check
clean clear close collect compare compute confirm connect convert copy count create decline delete deploy describe detect
disable download draw edit enable encode estimate export extract fetch filter find fix format generate get grade import
inspect install invite issue join label launch list load locate lock log lookup make mark measure merge monitor mount
move mute notify open order pack park pause pay pick plan play post predict print process publish query rank rate read
rebuild record refund register release remind remove rename render rent repair replace reply report request reserve reset
resize resolve restart restore retrieve return review run save scan schedule score search select send set share ship show
sign sort split start stop store submit subscribe sum suspend swap sync tag test track trade train transfer translate
trim unlock update upload use validate verify view vote wash watch water write
""".split()

COLOURS = "red blue green yellow orange purple pink brown black white grey silver gold teal crimson navy violet".split()
ANIMALS = """dog cat horse rabbit hamster parrot turtle goldfish snake lizard goat sheep pig duck donkey ferret gecko
pony canary llama hedgehog""".split()
FOODS = """pizza pasta sushi curry soup salad rice noodles tacos bread cheese apples mango lasagna dumplings pancakes
waffles stew chili falafel hummus ramen paella burgers fries""".split()
SPORTS = "tennis football chess hockey rugby golf cricket judo rowing cycling swimming skiing climbing boxing".split()
JOBS = """teacher nurse doctor lawyer baker carpenter pilot farmer engineer plumber chef designer painter writer
librarian gardener driver mechanic dentist architect biologist translator""".split()
LANGUAGES = """English French German Spanish Italian Portuguese Dutch Polish Swedish Danish Finnish Greek Turkish Arabic
Hebrew Hindi Bengali Japanese Korean Chinese Thai Vietnamese Russian Ukrainian Czech Romanian""".split()
COUNTRIES = """France Germany Spain Italy Portugal Poland Sweden Denmark Finland Greece Turkey Egypt Kenya Nigeria India
Japan Vietnam Thailand Australia Canada Mexico Brazil Chile Peru Norway Iceland Ireland Austria Hungary""".split()
CURRENCIES = "USD EUR GBP JPY CHF SEK NOK DKK PLN CZK INR CNY AUD CAD BRL MXN".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
UNITS = """kilometres miles metres feet inches pounds kilograms grams ounces litres gallons celsius fahrenheit hours
minutes seconds days weeks""".split()
ROOM_SET = """kitchen|bedroom|bathroom|garage|office|hallway|cellar|attic|garden|nursery|study|balcony|living room|
dining room""".replace("\n", "").split("|")
DOMAINS = "example.com mail.org post.net acme.io fjord.no alpha.dev orbit.co lumen.eu pine.org north.net".split()
EXTENSIONS = "txt md csv json py log pdf png yaml toml html docx".split()
